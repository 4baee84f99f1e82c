"""Memory of nodes in ONNX Runtime's words: the table by which it keeps a budget of a GPU, and which it writes itself.

A row has a node and the bytes that it brings: inputs of the model, weights, outputs, and what it takes while it runs.
Nodes are called NAME_HASH, with a hash of the names of their inputs and outputs, so that nodes of one name differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import NodeProto

from onnxplace.errors import InputError, format_value
from onnxplace.model.tensors import tensor_size
from onnxplace.utils.files import format_path, read_text

COLUMNS = ("#name", "input_sizes", "initializers_sizes", "total_dynamic_sizes", "total_temp_allocations")
_HASHED = re.compile(r"(.*)_([0-9]{1,20})", re.DOTALL)
_MASK = 0xFFFFFFFF
# Of MurmurHash3: factors and rotations of the four lanes of a block.
_FACTORS = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
_BLOCK_ROTATIONS, _LANE_ROTATIONS = (15, 16, 17, 18), (19, 17, 15, 13)
_ADDENDS = (0x561CCD1B, 0x0BCAA747, 0x96CD1C35, 0x32AC3B17)


@dataclass(frozen=True)
class NodeMemory:
    """The bytes that a node brings."""

    inputs: int
    weights: int
    outputs: int
    workspace: int


def hash_murmur(data: bytes, seed: int) -> tuple[int, int, int, int]:
    """Return MurmurHash3 of 128 bits, in its form for 32-bit processors, as four numbers.

    >>> hash_murmur(b"", 0)
    (0, 0, 0, 0)
    """

    def rotate(word: int, bits: int) -> int:
        return (word << bits | word >> (32 - bits)) & _MASK

    def scramble(word: int, lane: int) -> int:
        product = rotate(word * _FACTORS[lane] & _MASK, _BLOCK_ROTATIONS[lane])
        return product * _FACTORS[(lane + 1) % 4] & _MASK

    def read_block(block: bytes) -> list[int]:
        return [int.from_bytes(block[4 * lane : 4 * lane + 4], "little") for lane in range(4)]

    def mix(words: list[int]) -> list[int]:
        first = sum(words) & _MASK
        return [first, *((word + first) & _MASK for word in words[1:])]

    def finish(word: int) -> int:
        word = (word ^ word >> 16) * 0x85EBCA6B & _MASK
        word = (word ^ word >> 13) * 0xC2B2AE35 & _MASK
        return word ^ word >> 16

    state, whole = [seed] * 4, len(data) // 16 * 16
    for start in range(0, whole, 16):
        for lane, word in enumerate(read_block(data[start : start + 16])):
            turned = rotate(state[lane] ^ scramble(word, lane), _LANE_ROTATIONS[lane])
            state[lane] = ((turned + state[(lane + 1) % 4]) * 5 + _ADDENDS[lane]) & _MASK
    rest = read_block(data[whole:].ljust(16, b"\0"))
    state = [(word ^ scramble(rest[lane], lane)) ^ len(data) for lane, word in enumerate(state)]
    a, b, c, d = mix([finish(word) for word in mix(state)])
    return a, b, c, d


def name_with_hash(node: NodeProto) -> str:
    """Return what ONNX Runtime calls a node in such a table.

    >>> name_with_hash(NodeProto(name="n1", input=["x"], output=["a"]))
    'n1_1364810340818438518'
    """
    low, high = 0, 0
    for name in (*node.input, *node.output):
        low, high, _, _ = hash_murmur(name.encode(), low)
    return f"{node.name or node.op_type}_{low | high << 32}"


def format_stats(rows: Mapping[str, NodeMemory]) -> str:
    """Return the table of nodes by name.

    ONNX Runtime knows no quotes, and refuses the whole table for a line with a comma too many: nodes with commas or
    breaks of lines in their names are left out.
    """
    lines = [
        ",".join(map(str, (name, row.inputs, row.weights, row.outputs, row.workspace)))
        for name, row in rows.items()
        if not re.search(r"[,\r\n]", name)
    ]
    return "\n".join((",".join(COLUMNS), *lines, ""))


def read_stats(path: Path) -> dict[str, NodeMemory]:
    """Return the rows of a table by the names of nodes, without hashes; of equal names, the largest of each number.

    Raises InputError for another file.
    """
    where = format_path(path)
    hint = "ONNX Runtime writes it with session.collect_node_memory_stats_to_file and enable_mem_pattern=False"
    lines = read_text(path, "C011", "memory statistics").removeprefix("\ufeff").splitlines()
    if not lines or lines[0].split(",") != list(COLUMNS):
        first = format_value(lines[0] if lines else "")
        raise InputError("C011", f"expected the header {','.join(COLUMNS)}, got {first}", where=where, hint=hint)
    stats: dict[str, NodeMemory] = {}
    for line in filter(None, lines[1:]):
        # A name may have a comma, and ONNX Runtime writes no quotes.
        name, *cells = line.rsplit(",", 4)
        if len(cells) != 4 or not all(cell.isdecimal() and len(cell) < 19 for cell in cells):
            message = f"expected a node and four numbers of bytes, got {format_value(line)}"
            raise InputError("C011", message, where=where, hint=hint)
        match = _HASHED.fullmatch(name)
        key = match[1] if match else name
        known = stats.get(key, NodeMemory(0, 0, 0, 0))
        largest = map(max, vars(known).values(), map(int, cells))
        stats[key] = NodeMemory(*largest)
    if not stats:
        message = "there is no node in these statistics"
        raise InputError("C011", message, where=where, hint="run the session once, then delete it, which writes them")
    return stats


def collect_memory(
    nodes: Iterable[NodeProto], weights: Mapping[str, int], inputs: Iterable[str], costs: Mapping[str, Any]
) -> dict[str, NodeMemory] | None:
    """Return the memory of the nodes of a model, by their names with hashes; None where a size is unknown.

    Inputs and weights count for the first node that reads them.

    Args:
        nodes: The nodes, in the order of the model.
        weights: The bytes of each weight.
        inputs: The names of the inputs of the model.
        costs: A cost file (docs/costs.md), which has the bytes of values, and of workspace.
    """
    sizes, unread = costs.get("value_bytes", {}), {*inputs, *weights}
    rows: dict[str, NodeMemory] = {}
    for node in nodes:
        new = [name for name in dict.fromkeys(node.input) if name in unread]
        unread.difference_update(new)
        fed, made = [name for name in new if name not in weights], list(filter(None, node.output))
        if any(name not in sizes for name in (*fed, *made)):
            return None
        rows[name_with_hash(node)] = NodeMemory(
            inputs=sum(int(sizes[name]) for name in fed),
            weights=sum(weights[name] for name in new if name in weights),
            outputs=sum(int(sizes[name]) for name in made),
            workspace=int(costs.get("nodes", {}).get(node.name, {}).get("workspace_bytes", 0)),
        )
    return rows


def measure_weights(tensors: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of weights by name."""
    return {tensor.name: tensor_size(tensor) for tensor in tensors}


def add_workspace(costs: dict[str, Any], stats: Mapping[str, NodeMemory]) -> tuple[int, Sequence[str]]:
    """Set the workspace of the nodes of a cost file, in place; return how many have a row, and rows without a node."""
    nodes = costs["nodes"]
    known = [name for name in stats if name in nodes]
    for name in known:
        nodes[name]["workspace_bytes"] = stats[name].workspace
    return len(known), [name for name in stats if name not in nodes]
