"""The pass `replicate`: routes over devices with room, their shares and times, and refusals with reasons."""

import onnx
import pytest

import onnxplace
from onnxplace.errors import InfeasibleError, OnnxplaceError, UsageError
from onnxplace.facts import Routes, Segments
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.simulation.steady_state import HANDOVER_SECONDS
from onnxplace.state import State
from onnxplace.target.target import Device, Shared, Target
from tests.conftest import branches
from tests.support.chains import mlp

FRONT = "optimize,profile{estimate=true},coplace{join=never}"


def target(*cores: int, memory: int = 1 << 30, shared: tuple[Shared, ...] = ()) -> Target:
    return Target(tuple(Device(f"cpu:{i}", memory, cores=n) for i, n in enumerate(cores)), shared=shared)


def replicate(routes: str, devices: Target, placer: str = "single") -> State:
    state = State(devices).with_facts(bind(load(mlp()), {}, {}))
    options = f"{{routes={routes}}}" if routes else ""
    return Pipeline.parse(f"{FRONT},{placer},split,replicate{options}").run(state)[0]


def test_copies_on_equal_devices_share_the_requests():
    state = replicate("cpu:1;cpu:2", target(1, 1, 1))
    routes, alone = state[Routes], replicate("", target(1, 1, 1))[Routes]
    assert [route.share for route in routes.routes] == pytest.approx([1 / 3, 1 / 3])
    assert routes.interval_seconds == pytest.approx(alone.interval_seconds / 3)
    assert alone.routes == ()


def test_a_slower_device_gets_fewer_requests():
    state = replicate("cpu:1", target(4, 1))
    (route,) = state[Routes].routes
    own = state[Segments].simulation.makespan_seconds
    assert route.seconds.sum() > own
    assert route.share == pytest.approx(own / (own + route.seconds.sum()), rel=1e-3)


def test_copies_do_not_overlap_the_part_of_a_request_that_is_in_python():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[1] x) => (float[1] y) { y = Relu (x) }""")
    devices = Target(tuple(Device(f"cpu:{i}", 1 << 30, segment_seconds=1e-7) for i in range(2)))
    state = State(devices).with_facts(bind(load(model), {}, {}))
    routes = Pipeline.parse(f"{FRONT},single,split,replicate{{routes=cpu:1}}").run(state)[0][Routes]
    assert sum(route.seconds.sum() for route in routes.routes) < HANDOVER_SECONDS
    assert routes.interval_seconds == 2 * HANDOVER_SECONDS


def test_devices_that_slow_each_other_down_gain_less_from_copies():
    free = replicate("cpu:1", target(1, 1))[Routes].interval_seconds
    slowed = replicate("cpu:1", target(1, 1, shared=(Shared(("cpu:0", "cpu:1"), 1.5, 1.5),)))[Routes].interval_seconds
    assert slowed == pytest.approx(1.5 * free, rel=1e-3)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ("cpu:0", "it is there already"),
        ("cpu:1;cpu:1", "it is there already"),
        ("cpu:1+cpu:2", "expected 1 devices, in place of cpu:0, got 2"),
        ("cpu:7", "no device 'cpu:7'"),
    ],
)
def test_wrong_routes_are_refused_with_the_reason(routes, words):
    with pytest.raises(OnnxplaceError) as raised:
        replicate(routes, target(1, 1, 1))
    assert words in str(raised.value)


def test_a_device_cannot_follow_two_programs_of_one_request(tmp_path):
    onnx.save(branches(), tmp_path / "m.onnx")
    steps = f"{FRONT},m-etf,split,replicate{{routes=cpu:2+cpu:2}},emit"
    with pytest.raises(UsageError, match="U075") as raised:
        onnxplace.compile(
            tmp_path / "m.onnx", tmp_path / "b", target=target(1, 1, 1), shape={"batch": 64}, pipeline=steps
        )
    assert "twice" in raised.value.message


def test_a_copy_that_does_not_fit_is_refused():
    small = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 20)))
    with pytest.raises(InfeasibleError, match="P001") as raised:
        replicate("cpu:1", small)
    assert "cpu:1 lacks" in raised.value.message


def test_a_bundle_with_copies_says_so(tmp_path, run_cli):
    onnx.save(mlp(), tmp_path / "m.onnx")
    steps = f"{FRONT},single,split,replicate{{routes=cpu:1}},emit"
    result = run_cli("compile", tmp_path / "m.onnx", "--devices", "cpu:0,cpu:1", "--pipeline", steps, "--no-trial")
    assert result.code == 0, result.err
    assert "2 copies of the model; of the requests 50% on cpu:0, 50% on cpu:1" in result.out
    assert "requests/s" in result.out
    assert "P010" not in result.err, "no device is idle"
    result = run_cli("bench", tmp_path / "m.bundle", "--repeat", "2", "--in-flight", "4", "--no-memory")
    assert result.code == 0, result.err
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.startswith("cpu:")}
    assert all(float(row[1]) > 0 for row in rows.values()), "each device is measured on its route"


def test_copies_on_one_processor_gain_nothing():
    devices = tuple(Device(f"cpu:{i}", 1 << 30, processors=("core",)) for i in range(2))
    alone = replicate("", Target(devices))[Routes]
    assert replicate("cpu:1", Target(devices))[Routes].interval_seconds == pytest.approx(alone.interval_seconds)
