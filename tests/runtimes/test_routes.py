"""Requests on several routes: the choice of a route, right results on each, and failures that stay on theirs."""

import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.errors import ExecutionError
from onnxplace.machine import hardware
from onnxplace.passes.emit import Emit
from onnxplace.passes.optimize import Optimize
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.replicate import Replicate
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.runtimes.execution.segments import choose_route
from onnxplace.target.target import Device, Target
from tests.bundle.test_routes import copied
from tests.support.copies import compile_copies, make_feeds
from tests.support.random_models import random_models, reference
from tests.support.random_placements import RandomPlacement, assert_same, run_together


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    return compile_copies(tmp_path_factory.mktemp("replicas"))


def devices_of(result) -> set[str]:
    return {event.device for event in result.events}


@pytest.mark.parametrize(("cores", "shared"), [(1, True), (2, False)])
def test_copies_of_one_core_each_share_a_session_and_its_weights(tmp_path, monkeypatch, cores, shared):
    bundle = compile_copies(tmp_path, cores)
    monkeypatch.setattr(hardware, "available_cores", lambda: (0, 0, 0, 0))
    with onnxplace.InferenceSession(bundle) as session:
        first, second = (item.segments["cpu0-000"] for item in session._session.engine._routes)
        assert (first.session is second.session) == shared
        assert [first.device.id, second.device.id] == ["cpu:0", "cpu:1"]
        futures = [session.submit(make_feeds(number)) for number in range(8)]
        for number, future in enumerate(futures):
            assert_same(future.result().outputs["y"], session.run(["y"], make_feeds(number))[0])


def route(index: int, share: float) -> SimpleNamespace:
    return SimpleNamespace(index=index, share=share)


def in_flight(*counts: int) -> list[int]:
    return [index for index, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    ("shares", "counts", "chosen"),
    [
        ((0.5, 0.5), (0, 0), 0),
        ((0.1, 0.9), (0, 0), 0),  # a request alone
        ((0.5, 0.5), (1, 0), 1),
        ((0.5, 0.5), (1, 1), 0),
        ((0.8, 0.2), (1, 0), 0),
        ((0.8, 0.2), (4, 0), 1),
        ((0.1, 0.9), (0, 3), 1),
        ((0.4, 0.3, 0.3), (2, 1, 1), 1),
    ],
)
def test_a_request_takes_the_route_with_the_fewest_requests_for_its_share(shares, counts, chosen):
    routes = [route(index, share) for index, share in enumerate(shares)]
    assert choose_route(routes, in_flight(*counts)).index == chosen


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.integers(1, 60))
def test_requests_that_pile_up_divide_by_the_shares(weights, count):
    shares = [weight / sum(weights) for weight in weights]
    routes, flying = [route(index, share) for index, share in enumerate(shares)], []
    for _ in range(count):
        flying.append(choose_route(routes, flying).index)
    counts = Counter(flying)
    for index, share in enumerate(shares):
        assert counts[index] <= share * count + len(shares), "no route has much more than its share"


def test_one_request_alone_takes_the_first_route(replicas):
    with onnxplace.InferenceSession(replicas, trace=True) as session:
        assert {device for n in range(3) for device in devices_of(session.run_timed(make_feeds(n)))} == {"cpu:0"}


def test_requests_in_flight_use_all_copies_and_events_name_the_device(replicas):
    with onnxplace.InferenceSession(replicas, trace=True) as session:
        alone = [session.run(None, make_feeds(number))[0] for number in range(8)]
        results = [future.result() for future in [session.submit(make_feeds(number)) for number in range(8)]]
    assert set().union(*map(devices_of, results)) == {"cpu:0", "cpu:1"}
    for result, expected in zip(results, alone):
        np.testing.assert_array_equal(result.outputs["y"], expected)


def test_the_simulated_runtime_takes_the_routes_in_turn(replicas):
    with onnxplace.InferenceSession(replicas, runtime="simulated", trace=True) as session:
        counts = Counter(min(devices_of(session.submit(make_feeds(0)).result())) for _ in range(10))
        assert counts == {"cpu:0": 5, "cpu:1": 5}
        assert devices_of(session.run_timed(make_feeds(0))) == {"cpu:0"}


def test_a_failure_names_the_device_of_its_route_and_leaves_the_other_alone(replicas):
    with onnxplace.InferenceSession(replicas, trace=True) as session:
        broken = session._session.engine._routes[1].segments["cpu0-000"]

        def fail(*_):
            raise RuntimeError("broken")

        broken.run = fail
        futures = [session.submit(make_feeds(number)) for number in range(6)]
        errors = [future.exception() for future in futures]
        failed = [error for error in errors if error is not None]
        assert failed
        assert len(failed) < len(errors)
        assert all(isinstance(error, ExecutionError) and error.where == "cpu:1" for error in failed)
        assert session.run(None, make_feeds(1))


def test_requests_with_states_stay_on_the_first_route(tmp_path):
    bundle = copied(tmp_path / "states", "cpu:2+cpu:3", state=["total_next=total"])
    ones = np.ones(3, "f4")
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        session.run(None, {"x": ones, "total": ones})
        results = [future.result() for future in [session.submit({"x": ones}) for _ in range(6)]]
    assert set().union(*map(devices_of, results)) == {"cpu:0", "cpu:1"}


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    random_models(),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
    st.lists(st.permutations(range(4)), min_size=1, max_size=3),
)
def test_random_models_on_random_routes_compute_the_same(model, homes, orders):
    try:
        expected = reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    names = [f"cpu:{index}" for index in range(4)]
    target = Target(tuple(Device(name, 1 << 30) for name in names))
    steps = (Optimize(), ProfileCosts(estimate=True), RandomPlacement(tuple(homes)), Split())
    with tempfile.TemporaryDirectory() as folder:

        def compile_with(*further) -> onnxplace.Bundle:
            pipeline, output = Pipeline((*steps, *further, Emit())), Path(folder) / f"bundle{len(further)}"
            shape = model.dimensions
            return compile_model(model.proto, output, target=target, shape=shape, pipeline=pipeline).bundle

        used = [name for name, program in compile_with().manifest.programs.items() if program]
        routes = dict.fromkeys("+".join(names[index] for index in order[: len(used)]) for order in orders)
        routes.pop("+".join(used), None)
        assume(routes and used)
        assert_same(run_together(compile_with(Replicate(tuple(routes))), model.feeds * 3), expected * 3)
