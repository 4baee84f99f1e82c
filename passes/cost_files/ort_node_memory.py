"""The memory statistics that ONNX Runtime writes of its nodes (`session.collect_node_memory_stats_to_file`).

In bytes, the most of all runs of the session. Found by experiment with 1.31, and in its sources:

- `total_temp_allocations` is what a kernel asked for beside its outputs, all requests together: no less than its peak;
- `total_dynamic_sizes` is what was allocated for its outputs, each rounded up to 256 bytes; nothing for one that takes
  over an input's memory;
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

# Sizes of what is allocated are multiples of this.
ALIGNMENT = 256
# What ONNX Runtime appends to the name of a value to name the kernel in a blocked layout that makes it.
_BLOCKED = "_nchwc"


@dataclass(frozen=True)
class NodeBytes:
    """What the statistics say of a node."""

    made: int
    """Allocated for its outputs."""
    temporary: int
    """Allocated beside them, all together."""


def matched_nodes(rows: Mapping[str, NodeBytes], model: Model) -> dict[str, int]:
    """Return the node of the model, by index, for each name in the statistics that has one.

    By name where that is unique, which finds fused kernels too, as they are called after one of their nodes; by the
    hash, which finds nodes without a name; or, for kernels of a blocked layout, by the value that they make.
    """
    known = {node.name: index for index, node in enumerate(model.nodes)}
    makers = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
    parts = {name: name.rpartition("_")[::2] for name in rows}
    times = Counter(base for base, _ in parts.values())
    found = {name: known[base] for name, (base, _) in parts.items() if base in known and times[base] == 1}
    rest = [name for name in rows if name not in found]
    taken = set(found.values())
    hashes = {node_hash(node): index for index, node in enumerate(model.nodes) if rest and index not in taken}
    for name in rest:
        base, number = parts[name]
        value = base.removesuffix(_BLOCKED)
        index = hashes.get(number, makers.get(value) if value != base else None)
        if index is not None:
            found[name] = index
    return found


def workspaces(rows: Mapping[str, NodeBytes], nodes: Mapping[str, int], count: int) -> Longs:
    """Return the workspace of each of `count` nodes, zero where nothing is known of it."""
    found = np.zeros(count, dtype=np.int64)
    for name, index in nodes.items():
        found[index] = max(found[index], rows[name].temporary)
    return found


def unknown_sizes(
    rows: Mapping[str, NodeBytes], nodes: Mapping[str, int], model: Model, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return sizes of values that are not in `sizes`, as far as the statistics tell: up to 255 bytes too much each.

    They do if the node ran as it is in the model, and all but one of its outputs are known.
    """
    found = {}
    for name, index in nodes.items():
        outputs = list(filter(None, model.nodes[index].output))
        unknown = [output for output in outputs if output not in sizes]
        if len(unknown) == 1 and name.endswith(f"_{node_hash(model.nodes[index])}"):
            others = sum(-(-sizes[output] // ALIGNMENT) * ALIGNMENT for output in outputs if output in sizes)
            if rows[name].made > others:
                found[unknown[0]] = rows[name].made - others
    return found


def node_hash(node: NodeProto) -> str:
    """Return the number by which ONNX Runtime tells nodes of one name apart."""
    state = (0, 0, 0, 0)
    for name in (*node.input, *node.output):
        state = _murmur(name.encode(), state[0])
    return str(state[0] | state[1] << 32)


_WORD = 0xFFFFFFFF
_FACTORS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
_ADDED = (0x561CCD1B, 0x0BCAA747, 0x96CD1C35, 0x32AC3B17)
_SPUN, _TURNED = (15, 16, 17, 18), (19, 17, 15, 13)


def _murmur(data: bytes, seed: int) -> tuple[int, int, int, int]:
    """Return MurmurHash3 of bytes, in its form of 128 bits for 32-bit machines (A. Appleby, 2011)."""
    state = [seed] * 4
    whole = len(data) // 16 * 16
    for start in range(0, whole, 16):
        for i in range(4):
            state[i] ^= _scrambled(data[start + 4 * i : start + 4 * i + 4], i)
            state[i] = _rotated(state[i], _TURNED[i]) + state[(i + 1) % 4]
            state[i] = (state[i] * 5 + _ADDED[i]) & _WORD
    for i in range(4):
        state[i] ^= _scrambled(data[whole + 4 * i : whole + 4 * i + 4], i) ^ len(data)
    state = [_mixed(word) for word in _spread(state)]
    first, second, third, fourth = _spread(state)
    return first, second, third, fourth


def _scrambled(part: bytes, lane: int) -> int:
    word = int.from_bytes(part, "little") * _FACTORS[lane] & _WORD
    return _rotated(word, _SPUN[lane]) * _FACTORS[(lane + 1) % 4] & _WORD


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _WORD


def _spread(state: list[int]) -> list[int]:
    first = sum(state) & _WORD
    return [first, *((word + first) & _WORD for word in state[1:])]


def _mixed(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & _WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & _WORD
    return word ^ word >> 16
