"""Segments, programs of devices, routes, and the bundle on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from onnxplace.facts.conditions import require, require_memory
from onnxplace.facts.costs import Profile
from onnxplace.facts.placement import Placement, Schedule
from onnxplace.graph import Floats, Ints
from onnxplace.simulation import Simulation

if TYPE_CHECKING:
    from onnxplace.state import State


@dataclass(frozen=True)
class Segment:
    """A convex subgraph of the model, which one device runs in one call."""

    device: int
    nodes: Ints
    """Node ids, in the model's order."""
    inputs: tuple[str, ...]
    """Values that it reads from outside."""
    outputs: tuple[str, ...]
    """Values that other segments, or the caller, read."""


@dataclass(frozen=True)
class Instruction:
    """One step of a device's program.

    `run` a segment; `send` a value to a peer device; `receive` a value from a peer; `free` a value.
    """

    op: Literal["run", "send", "receive", "free"]
    segment: int = -1
    """Index of the segment to run."""
    value: str = ""
    """Name of the value to send, receive or free."""
    peer: int = -1
    """Index of the other device of a transfer."""


@dataclass(frozen=True)
class Segments:
    """The model as segments, and each device's program."""

    derived_from: ClassVar[tuple[type, ...]] = (Schedule,)

    segments: tuple[Segment, ...]
    """In topological order."""
    programs: tuple[tuple[Instruction, ...], ...]
    """Program of each device of the target."""
    simulation: Simulation
    """The predicted step with the overhead of segments; its nodes are segments."""

    def check(self, state: State) -> None:
        """Raise ValueError unless segments partition the nodes, receives have sends, and devices keep their limits."""
        covered = sorted(int(node) for segment in self.segments for node in segment.nodes)
        require(covered == list(range(len(state[Profile].graph))), "segments must partition the nodes")
        placement = state[Placement].device
        for segment in self.segments:
            require(bool((placement[segment.nodes] == segment.device).all()), "a segment runs nodes of two devices")
        steps = [(device, step) for device, program in enumerate(self.programs) for step in program]
        sends = {(step.value, device, step.peer) for device, step in steps if step.op == "send"}
        receives = {(step.value, step.peer, device) for device, step in steps if step.op == "receive"}
        require(sends == receives, f"unmatched transfers: {sorted(sends ^ receives)[:3]}")
        require_memory(state, self.simulation)


@dataclass(frozen=True)
class Route:
    """A further way of requests through the programs: on other devices."""

    device: Ints
    """Per device of the target, the one that follows its program; -1 for devices without a program."""
    seconds: Floats
    """Per segment: predicted time on its device of this route, one request at a time."""
    share: float
    """Of the requests."""


@dataclass(frozen=True)
class Routes:
    """Further routes: copies of the model, of a pipeline, or of stages."""

    derived_from: ClassVar[tuple[type, ...]] = (Segments,)
    routes: tuple[Route, ...]
    """Without the first one: the programs on their own devices."""
    interval_seconds: float
    """Between two results, with requests in flight on all routes; at least Python's part of a request."""

    def check(self, state: State) -> None:
        """Raise ValueError unless each route gives each program to a device of its own."""
        segments, used = state[Segments], np.array([bool(program) for program in state[Segments].programs])
        for route in self.routes:
            is_valid = bool((route.device[~used] == -1).all()) and route.device.max(initial=-1) < len(used)
            is_valid &= len(set(route.device[used].tolist()) - {-1}) == used.sum()
            require(bool(is_valid), "a route must give each program to a device of its own")
            require(len(route.seconds) == len(segments.segments), "expected a time per segment")


@dataclass(frozen=True)
class Emitted:
    """The bundle on disk."""

    derived_from: ClassVar[tuple[type, ...]] = (Segments, Routes)

    path: Path

    def check(self, state: State) -> None:
        """Raise ValueError unless the bundle has a manifest."""
        require((self.path / "manifest.json").is_file(), f"no manifest in {self.path}")
