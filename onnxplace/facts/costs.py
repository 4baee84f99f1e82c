"""The costs of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxplace.facts.conditions import require
from onnxplace.graph import Floats, Ints, OpGraph
from onnxplace.model import Model
from onnxplace.training_roles import TrainingRoles

if TYPE_CHECKING:
    from onnxplace.state import State


class Source(IntEnum):
    """The origin of a node's time."""

    MEASURED = 0
    """Measured on this machine with ONNX Runtime."""
    GIVEN = 1
    """Given by a cost file, as measured or written by the user."""
    ESTIMATED = 2
    """Estimated by a roofline model, from operations and bytes; cost files may hold such times, too."""
    KNOWN = 3
    """Known to be zero: constants, folded and removed nodes."""


@dataclass(frozen=True)
class Repeat:
    """Equal consecutive layers, in the model's order."""

    start: int
    """Position of the first node."""
    nodes: int
    """Number of nodes per layer."""
    count: int
    """Number of layers."""

    @property
    def stop(self) -> int:
        """Return the position after the last node."""
        return self.start + self.nodes * self.count


@dataclass(frozen=True)
class Quality:
    """The reliability of a measurement of a whole model."""

    runs: int
    """Runs without the profiler that were used."""
    spread: float
    """Half of the runs are within this share of the median."""
    uncertainty: float
    """Standard error of the median, as a share of it."""
    waiting: float
    """Share of the time in which these runs waited for a core; it was subtracted."""
    kernels: int
    """Number of kernels that the profiler measured."""
    kernel_seconds: float
    """Sum of their times, as the profiler reported them."""
    overhead_seconds: float
    """Time that the profiler added to each kernel; it was subtracted."""


@dataclass(frozen=True)
class Profile:
    """The operator graph with the cost of each node on each class of device."""

    derived_from: ClassVar[tuple[type, ...]] = (Model,)

    graph: OpGraph
    seconds: Mapping[str, Floats]
    """Cost class (`Device.cost_class`) -> seconds, per node."""
    sources: Mapping[str, NDArray[np.uint8]]
    """Cost class -> `Source`, per node."""
    unit: Ints
    """Dense id per node; nodes with one id were measured as one kernel and stay together."""
    whole_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> median time of the whole model in one session; measured classes only."""
    given: Ints | None = None
    """The graph's own groups: an id per node, -1 for none."""
    backward: NDArray[np.bool_] | None = None
    """Per node: part of the backward pass of a training step."""
    training: TrainingRoles | None = None
    """What nodes are for, if the model is a training step in ONNX; None for cost graphs."""
    repeats: tuple[Repeat, ...] = ()
    """Equal layers of the model, which were measured as one; empty if they were not searched for."""
    spread: Mapping[str, Floats] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> half the interquartile range of the times, in seconds, per node; measured classes only."""
    quality: Mapping[str, Quality] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> reliability of its measurement; only for classes measured on the whole model."""
    prints: tuple[str, ...] = ()
    """Fingerprint per node, which identifies it in cost files and other models; empty if not computed."""
    unsharded_seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Cost class -> seconds of the whole model before it was sharded; empty for models that are not."""

    def rewritten(
        self,
        graph: OpGraph,
        source: NDArray[np.integer],
        unit: Ints,
        new_seconds: Floats | float,
        share: Floats | float,
    ) -> Profile:
        """Return the profile of a rewritten graph, without roles and groups.

        Args:
            graph: The new graph.
            source: Per new node, the node that it is a part or copy of; -1 for none.
            unit: Per new node, its kernel.
            new_seconds: Time of nodes without a source; as sure as the rest of their class.
            share: What a node takes of the time and workspace of its source.
        """
        is_new, seconds, sources = source < 0, dict[str, Floats](), dict[str, NDArray[np.uint8]]()
        for name, times in self.seconds.items():
            is_measured = bool(np.isin(self.sources[name], (Source.MEASURED, Source.KNOWN)).all())
            new_source = np.uint8(Source.MEASURED if is_measured else Source.ESTIMATED)
            seconds[name] = np.where(is_new, new_seconds, times[source] * share)
            sources[name] = np.where(is_new, new_source, self.sources[name][source]).astype(np.uint8)
        workspace = np.where(is_new, 0, self.graph.workspace_bytes[source] * share).astype(np.int64)
        return Profile(
            graph=replace(graph, workspace_bytes=workspace),
            seconds=MappingProxyType(seconds),
            sources=MappingProxyType(sources),
            unit=unit,
            backward=None if self.backward is None else ~is_new & self.backward[source],
            unsharded_seconds=self.unsharded_seconds,
        )

    def check(self, state: State) -> None:
        """Raise ValueError unless every device's class has a finite cost for every node."""
        count = len(self.graph)
        for device in state.target.devices:
            require(device.cost_class in self.seconds, f"no costs for {device.id} (class {device.cost_class})")
        for name, seconds in self.seconds.items():
            require(len(seconds) == count, f"{name}: expected {count} costs, one per node, got {len(seconds)}")
            invalid = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
            node = self.graph.names[invalid[0]] if len(invalid) else ""
            require(len(invalid) == 0, f"{name}: expected a finite, non-negative cost for node {node!r}")
        for name, spread in self.spread.items():
            is_valid = len(spread) == count and bool((np.isfinite(spread) & (spread >= 0)).all())
            require(is_valid, f"{name}: expected a finite, non-negative spread per node")
        require(len(self.unit) == count, f"expected {count} units, one per node, got {len(self.unit)}")
        roles = self.training
        require(roles is None or len(roles.phase) == len(roles.parameter) == count, "expected a role per node")
        require(len(self.prints) in (0, count), f"expected {count} fingerprints or none, got {len(self.prints)}")
