"""Group nodes that must or should share a device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onnxplace.costs import device_seconds
from onnxplace.errors import InputError, TargetError, UsageError
from onnxplace.facts import Groups, Profile
from onnxplace.files import read_json
from onnxplace.graph import Floats, Ints, OpGraph
from onnxplace.state import Diagnostic, Pass, State
from onnxplace.target import Target


@dataclass(frozen=True)
class Coplace(Pass):
    """Group nodes by, in this order: the user's wishes, kernels that ONNX Runtime fuses, and traffic.

    `join` says when a node whose values have a single reader joins that reader (Baechi, SoCC 2020, section 4):
    `worth` if sending its values would take longer than computing the node, `always` as published, or `never`.
    """

    name: ClassVar[str] = "coplace"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Groups,)

    join: Literal["worth", "always", "never"] = "worth"
    """When a node joins its only reader."""
    given: bool = True
    """Keep the graph's own groups together."""
    colocate: tuple[str, ...] = ()
    """Regular expressions; the nodes whose whole name one matches share a device."""
    device_map: str = ""
    """A JSON file of regular expression -> device; the first that matches a node's whole name decides."""

    def run(self, state: State) -> State:
        profile, target = state[Profile], state.target
        graph = profile.graph
        union = _Union(_pins(self.device_map, graph, target))
        for pattern in self.colocate:
            _join_matching(union, graph, pattern)
        if self.given and profile.given is not None:
            for first, node in _pairs(profile.given):
                if profile.given[node] >= 0:
                    union.join(first, node, "the graph's own group")
        torn = [node for first, node in _pairs(profile.unit) if not union.join(first, node, "one kernel")]
        if self.join != "never" and len(target.devices) > 1:
            for node, reader in _only_readers(graph, target, device_seconds(profile, target), self.join == "always"):
                union.join(node, reader, "its only reader")
        notes = (
            [
                Diagnostic(
                    "G010",
                    "the device map splits what ONNX Runtime would run as one kernel",
                    where=graph.names[torn[0]],
                )
            ]
            if torn
            else []
        )
        return state.having(union.groups()).saying(*notes)


class _Union:
    """Disjoint sets of nodes that refuse to join nodes pinned to different devices."""

    def __init__(self, pinned: Ints) -> None:
        self.parent = list(range(len(pinned)))
        self.pinned = pinned.tolist()
        self.reason = [""] * len(pinned)

    def find(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, a: int, b: int, reason: str) -> bool:
        """Put two nodes into one set; False if they are pinned apart."""
        first, second = sorted((self.find(a), self.find(b)))
        pins = {self.pinned[first], self.pinned[second]} - {-1}
        if len(pins) > 1:
            return False
        if first != second:
            self.parent[second] = first
            self.pinned[first] = max(self.pinned[first], self.pinned[second])
            self.reason[first] = self.reason[first] or reason
        return True

    def groups(self) -> Groups:
        roots = [self.find(node) for node in range(len(self.parent))]
        dense = {root: index for index, root in enumerate(dict.fromkeys(roots))}
        group = np.array([dense[root] for root in roots], dtype=np.int32)
        return Groups(
            group,
            np.array([self.pinned[root] for root in dense], dtype=np.int32),
            tuple(self.reason[root] for root in dense),
        )


def _pairs(unit: Ints) -> Iterator[tuple[int, int]]:
    """Yield, for each node, the first node of its unit and itself."""
    first: dict[int, int] = {}
    for node, key in enumerate(unit.tolist()):
        yield first.setdefault(key, node), node


def _join_matching(union: _Union, graph: OpGraph, pattern: str) -> None:
    expression = _compiled(pattern, "--colocate")
    matching = [node for node, name in enumerate(graph.names) if expression.fullmatch(name)]
    if not matching:
        raise UsageError(
            "U020",
            f"no node's name matches {pattern!r}",
            where="--colocate",
            hint=f"names look like {', '.join(repr(name) for name in graph.names[:3])}",
        )
    for node in matching:
        if not union.join(matching[0], node, f"--colocate {pattern}"):
            raise UsageError(
                "U021",
                f"{pattern!r} joins nodes that the device map puts on different devices",
                where="--colocate",
                hint=f"one of them is {graph.names[node]!r}",
            )


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise UsageError("U022", f"not a regular expression: {pattern!r}: {problem}", where=where) from None


def _pins(path: str, graph: OpGraph, target: Target) -> Ints:
    """Return the device each node is pinned to by the user's device map, -1 for none."""
    pinned = np.full(len(graph), -1, dtype=np.int32)
    if not path:
        return pinned
    rules = [(_compiled(pattern, path), _device(device, target, path)) for pattern, device in _read_map(path).items()]
    unused = {rule.pattern for rule, _ in rules}
    for node, name in enumerate(graph.names):
        for rule, device in rules:
            if rule.fullmatch(name):
                pinned[node] = device
                unused.discard(rule.pattern)
                break
    if unused:
        raise UsageError(
            "U020",
            f"no node is left for {', '.join(repr(p) for p in sorted(unused))}",
            where=path,
            hint=f"names look like {', '.join(repr(name) for name in graph.names[:3])}; the first match wins",
        )
    return pinned


def _device(name: str, target: Target, path: str) -> int:
    try:
        return target.position(name)
    except TargetError as problem:
        raise TargetError(problem.code, problem.message, where=path, hint=problem.hint) from None


def _read_map(path: str) -> Mapping[str, str]:
    data = read_json(path, "U023", "a device map")
    if not isinstance(data, dict) or not all(isinstance(device, str) for device in data.values()):
        raise InputError("U023", "not a device map", where=path, hint='write it like {"encoder.*": "cuda:0"}')
    return data


def _only_readers(graph: OpGraph, target: Target, seconds: Floats, always: bool) -> Iterator[tuple[int, int]]:
    """Yield (node, reader) for each node that all readers of its values make up one node, if joining is worth it."""
    latency, per_byte = target.link_arrays()
    apart = ~np.eye(len(latency), dtype=bool)
    fastest_latency, fastest_byte = latency[apart].min(), per_byte[apart].min()
    own = seconds.min(axis=0)
    for node in range(len(graph)):
        after = graph.successors[node]
        if len(after) == 1:
            sent = [int(graph.value_bytes[v]) for v in graph.outputs[node] if len(graph.readers[v])]
            transfer = len(sent) * fastest_latency + sum(sent) * fastest_byte
            if always or own[node] <= transfer:
                yield node, int(after[0])
        elif len(after) > 1 and own[node] == 0.0 and not len(graph.predecessors[node]):
            yield node, int(after[0])  # a constant that costs nothing: no reason to be alone
