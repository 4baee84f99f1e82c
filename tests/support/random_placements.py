"""Random placements, and bundles that are compared with their models."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from hypothesis import assume, strategies as st
from onnx import ModelProto

import onnxplace
import onnxplace.runtimes.execution.segments as runtime
from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.export.exporting import export_bundle
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.machine.ort_sessions import Level, make_session_options
from onnxplace.passes.coplace import Coplace
from onnxplace.passes.emit import Emit
from onnxplace.passes.fuse import Fuse
from onnxplace.passes.optimize import Optimize
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.state import Pass, State
from onnxplace.target.target import Device, Target
from tests.support.fault_checks import HUNG_SECONDS
from tests.support.random_models import Feeds, RandomModel, reference

DEVICES = 4


@dataclass(frozen=True)
class RandomPlacement(Pass):
    """Place and order nodes by two lists, which are repeated as often as needed."""

    name: ClassVar[str] = "random-placement"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    devices: tuple[int, ...] = (0,)
    """Device of each group of nodes, in the model's order: (0, 1) changes the device at every node without groups."""
    delays: tuple[int, ...] = (0,)
    """Planned delay of each node after the last of its inputs; these define the order."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        graph = problem.graph
        device = np.resize(np.array(self.devices, dtype=np.int32), len(graph))[problem.group]
        start = np.resize(np.array(self.delays, dtype=np.float64), len(graph))
        for node in graph.order:
            start[node] += start[graph.predecessors[node]].max(initial=0.0)
        return commit_placement(state, problem, device, start, self.name)


def placements() -> st.SearchStrategy[RandomPlacement]:
    devices = st.one_of(
        st.sampled_from(((0,), (0, 1), (0, 1, 2), (0, 0, 1, 1))),
        st.lists(st.integers(0, DEVICES - 1), min_size=1, max_size=16).map(tuple),
    )
    delays = st.lists(st.integers(0, 9), min_size=1, max_size=16).map(tuple)
    return st.builds(RandomPlacement, devices, delays)


def compiled_with(
    proto: ModelProto | Path,
    placement: RandomPlacement,
    folder: Path,
    *,
    optimized: bool = True,
    fused: bool = False,
    dimensions: Mapping[str, int] = MappingProxyType({}),
    names: Sequence[str] = tuple(f"cpu:{index}" for index in range(DEVICES)),
) -> Bundle:
    """Return the bundle of a model with this placement on devices of these names, with estimated costs."""
    before, after = [Optimize()] if optimized else [], [Coplace(), Fuse()] if fused else []
    steps = (*before, ProfileCosts(estimate=True), *after, placement, Split(), Emit())
    devices = tuple(Device(name, 1 << 30) for name in names[: max(placement.devices) + 1])
    compiled = compile_model(
        proto, folder / "bundle", target=Target(devices), shape=dimensions, pipeline=Pipeline(steps)
    )
    return compiled.bundle


@contextmanager
def exported_with(
    model: RandomModel, placement: RandomPlacement, to: str, *, optimized: bool
) -> Iterator[tuple[Bundle, Path, list[list[Any]]]]:
    """Yield a bundle, its export in this format, and the outputs of the model; leave out what ONNX Runtime refuses.

    An export is opened with ONNX Runtime's own options, and some of its optimisations break models: folding an If of
    a constant condition drops a value whose consumer is left.
    """
    try:
        reference(model.proto, model.feeds, "all")
        expected = reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = compiled_with(model.proto, placement, folder, optimized=optimized, dimensions=model.dimensions)
        export_bundle(bundle, to, folder / "out")
        yield bundle, folder / "out", expected


def run_together(bundle: Bundle, feeds: Sequence[Feeds], level: Level = "all") -> list[list[Any]]:
    """Return the outputs for each of several feeds, with their requests in flight at the same time."""
    with mock.patch.object(runtime, "make_session_options", partial(make_session_options, level=level)):
        session = onnxplace.InferenceSession(bundle)
    futures = [session.submit(fed) for fed in feeds]
    try:
        results = [future.result(timeout=HUNG_SECONDS) for future in futures]
    except OutOfTime:
        session.close(timeout=0)
        raise
    session.close()
    return [[result.outputs[item.name] for item in session.get_outputs()] for result in results]


def assert_same(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless both are bitwise equal: types, shapes, elements, NaN included."""
    if isinstance(expected, list):
        assert isinstance(actual, list)
        assert len(actual) == len(expected)
        for first, second in zip(actual, expected):
            assert_same(first, second)
    elif isinstance(expected, np.ndarray):
        assert isinstance(actual, np.ndarray)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected
