"""The memory statistics that ONNX Runtime writes of its nodes (`session.collect_node_memory_stats_to_file`).

In bytes, the maximum of all runs of the session. By experiment with 1.31, and by its sources:

- `total_temp_allocations` is what a kernel allocated next to its outputs, all requests together: at least its peak;
- `total_dynamic_sizes` is what was allocated for its outputs, each rounded up to 256 bytes; zero for an output that
  takes over an input's memory;
- `input_sizes` counts a value at its first reader only, weights too; `initializers_sizes` is zero.

A node is called by its name, or its operator if it has none, and a hash of the names of its inputs and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from onnxplace.graph import Longs
from onnxplace.model import Model

# Allocated sizes are multiples of this.
ALIGNMENT = 256
# The suffix by which ONNX Runtime names a kernel in a blocked layout after its output.
_BLOCKED = "_nchwc"


@dataclass(frozen=True)
class NodeBytes:
    """The statistics of a node."""

    output_bytes: int
    """Allocated for its outputs."""
    temporary_bytes: int
    """Allocated next to them, all together."""


def match_nodes(rows: Mapping[str, NodeBytes], model: Model) -> dict[str, int]:
    """Return the index of the node of each name, if found.

    Matches by name where it is unique; this finds fused kernels too, which are named after one of their nodes. Else
    matches by the hash, which finds nodes without a name, or, for kernels of a blocked layout, by their output.
    """
    index_of_name = {node.name: index for index, node in enumerate(model.nodes)}
    producers = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
    parts = {name: name.rpartition("_")[::2] for name in rows}
    name_counts = Counter(base for base, _ in parts.values())
    matches = {
        name: index_of_name[base]
        for name, (base, _) in parts.items()
        if base in index_of_name and name_counts[base] == 1
    }
    unmatched = [name for name in rows if name not in matches]
    matched = set(matches.values())
    hashes = {node_hash(node): index for index, node in enumerate(model.nodes) if unmatched and index not in matched}
    for name in unmatched:
        base, number = parts[name]
        value = base.removesuffix(_BLOCKED)
        index = hashes.get(number, producers.get(value) if value != base else None)
        if index is not None:
            matches[name] = index
    return matches


def node_workspaces(rows: Mapping[str, NodeBytes], nodes: Mapping[str, int], count: int) -> Longs:
    """Return the workspace bytes of each node, 0 if unknown."""
    workspace_bytes = np.zeros(count, dtype=np.int64)
    for name, index in nodes.items():
        workspace_bytes[index] = max(workspace_bytes[index], rows[name].temporary_bytes)
    return workspace_bytes


def find_unknown_sizes(
    rows: Mapping[str, NodeBytes], nodes: Mapping[str, int], model: Model, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return sizes of values that are not in `sizes`.

    Each is up to 255 bytes too large. Found where a node ran as it is in the model, and `sizes` has all its outputs
    except one.
    """
    new_sizes = {}
    for name, index in nodes.items():
        outputs = list(filter(None, model.nodes[index].output))
        unknown = [output for output in outputs if output not in sizes]
        if len(unknown) == 1 and name.endswith(f"_{node_hash(model.nodes[index])}"):
            known_bytes = sum(-(-sizes[output] // ALIGNMENT) * ALIGNMENT for output in outputs if output in sizes)
            if rows[name].output_bytes > known_bytes:
                new_sizes[unknown[0]] = rows[name].output_bytes - known_bytes
    return new_sizes


def node_hash(node: NodeProto) -> str:
    """Return the hash by which ONNX Runtime distinguishes nodes of one name."""
    state = (0, 0, 0, 0)
    for name in (*node.input, *node.output):
        state = _murmur(name.encode(), state[0])
    return str(state[0] | state[1] << 32)


# The constants of MurmurHash3.
_WORD = 0xFFFFFFFF
_FACTORS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
_ADDENDS = (0x561CCD1B, 0x0BCAA747, 0x96CD1C35, 0x32AC3B17)
_BLOCK_ROTATIONS, _STATE_ROTATIONS = (15, 16, 17, 18), (19, 17, 15, 13)


def _murmur(data: bytes, seed: int) -> tuple[int, int, int, int]:
    """Return MurmurHash3 of bytes, 128 bits for 32-bit machines.

    A. Appleby, 2011.
    """
    state = [seed] * 4
    whole = len(data) // 16 * 16
    for start in range(0, whole, 16):
        for i in range(4):
            state[i] ^= _scramble(data[start + 4 * i : start + 4 * i + 4], i)
            state[i] = _rotate(state[i], _STATE_ROTATIONS[i]) + state[(i + 1) % 4]
            state[i] = (state[i] * 5 + _ADDENDS[i]) & _WORD
    for i in range(4):
        state[i] ^= _scramble(data[whole + 4 * i : whole + 4 * i + 4], i) ^ len(data)
    state = [_mix(word) for word in _spread_sum(state)]
    first, second, third, fourth = _spread_sum(state)
    return first, second, third, fourth


def _scramble(part: bytes, lane: int) -> int:
    word = int.from_bytes(part, "little") * _FACTORS[lane] & _WORD
    return _rotate(word, _BLOCK_ROTATIONS[lane]) * _FACTORS[(lane + 1) % 4] & _WORD


def _rotate(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _WORD


def _spread_sum(state: list[int]) -> list[int]:
    first = sum(state) & _WORD
    return [first, *((word + first) & _WORD for word in state[1:])]


def _mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & _WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & _WORD
    return word ^ word >> 16
