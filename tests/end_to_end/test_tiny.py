"""examples/tiny.py: it computes what the model computes, on both devices, and predicts what the real simulator does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, note, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper, parser, printer

import models
import tiny
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.simulation.simulator import simulate
from onnxplace.target.target import Device, Link, Target

SCRIPT = Path(tiny.__file__)
SIZE = 4
TWICE = '<opset_import: ["": 17], domain: "local"> twice (a) => (b) { b = Add(a, a) }'


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def assert_ran_on_both_devices(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines[:2]] == ["cpu:0", "cpu:1"]
    assert all("run " in line for line in lines[:2])
    assert lines[2] == "all outputs equal those of one session"
    assert [line.partition(" ms, measured ")[0].rpartition(" ")[0] for line in lines[3:]] == [
        "one device: predicted",
        "two devices: predicted",
    ]


def test_the_command_compiles_its_model_for_both_devices_and_compares_outputs(tmp_path: Path):
    assert_ran_on_both_devices(run_script(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"two_branches.onnx", "tiny.bundle"}


@pytest.mark.parametrize("name", ["two-encoders", pytest.param("squeezenet", marks=pytest.mark.slow)])
def test_the_command_takes_real_models(name: str, tmp_path: Path):
    models.save(models.build(name), tmp_path / "model.onnx")
    assert_ran_on_both_devices(run_script(tmp_path, "model.onnx"))


@pytest.mark.parametrize("graph", ["(float[N] x) => (float[N] y) { y = Abs(x) }", "(bool x) => (float y) { LOOP }"])
def test_what_needs_the_real_thing_is_refused_in_one_line(graph: str, tmp_path: Path):
    branch = "g () => (float z) { z = Constant <value = float {1}> () }"
    graph = graph.replace("LOOP", f"y = If (x) <then_branch = {branch}, else_branch = {branch.replace('z', 'u')}>")
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {graph}'), tmp_path / "model.onnx")
    done = run_script(tmp_path, "model.onnx")
    assert done.returncode == 1
    assert done.stderr == "tiny.py: symbolic sizes and control flow need the real thing: onnxplace compile\n"


def compile_for_two(model: onnx.ModelProto, folder: Path, memory_bytes: int = 1 << 30) -> tiny.State:
    onnx.save(model, folder / "model.onnx")
    target = tiny.Target((tiny.Device("cpu:0", memory_bytes), tiny.Device("cpu:1", memory_bytes)), latency_seconds=1e9)
    return tiny.compile_model(folder / "model.onnx", target, folder / "tiny.bundle")


def test_a_chain_leaves_its_device_only_where_memory_ends(tmp_path: Path):
    text = "chain (float[1, 256] x) => (float[1, 256] y) { a = MatMul(x, w0) b = MatMul(a, w1) y = MatMul(b, w0) }"
    chain = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    weights = [numpy_helper.from_array(np.full((256, 256), n, np.float32), f"w{n}") for n in range(2)]
    chain.graph.initializer.extend(weights)
    assert compile_for_two(chain, tmp_path)[tiny.Placement].device == (0, 0, 0)
    state = compile_for_two(chain, tmp_path, 300 << 10)
    model, device = state[tiny.Model], state[tiny.Placement].device
    assert device == (0, 1, 0)
    for home in (0, 1):
        nodes = [node for node in range(3) if device[node] == home]
        held = {name for node in nodes for name in (*model.stored[node], *model.reads[node], *model.makes[node])}
        assert sum(state[tiny.Profile].size_bytes[name] for name in held) <= 300 << 10
    with pytest.raises(SystemExit, match="no device has enough memory left for MatMul"):
        compile_for_two(chain, tmp_path, 200 << 10)


def test_a_device_that_fails_wakes_the_other_and_its_error_is_raised(tmp_path: Path):
    state = compile_for_two(tiny.build_two_branches(), tmp_path)
    session, feeds = tiny.InferenceSession(tmp_path / "tiny.bundle"), state[tiny.Model].feeds(seed=0)
    (sender,) = [step.peer for program in state[tiny.Segments].programs for step in program if step.op == "receive"]
    broken = next(step.segment for step in state[tiny.Segments].programs[sender] if step.op == "run")
    opened, session.segments[broken] = session.segments[broken], None
    with pytest.raises(AttributeError, match="NoneType"):
        session.run(feeds)
    session.segments[broken] = opened
    assert session.run(feeds)["y"].shape == (128, 768)


@dataclass
class Builder:
    """A model that grows by random nodes; all values are small whole numbers, so that no sum is rounded."""

    draw: st.DrawFn
    nodes: list[onnx.NodeProto]
    values: list[str]
    weights: dict[str, onnx.TensorProto]

    def pick(self) -> str:
        return self.draw(st.sampled_from(self.values))

    def name(self) -> str:
        return f"v{len(self.nodes)}"

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: object) -> None:
        made = list(outputs) or [self.name()]
        domain = "local" if op == "twice" else ""
        self.nodes.append(helper.make_node(op, inputs, made, domain=domain, **attributes))
        self.values += [name for name in made if name and not name.endswith("mask")]

    def weight(self) -> str:
        name = self.draw(st.sampled_from(["w0", "w1", "w2"]))
        if name not in self.weights:
            array = np.random.default_rng(len(self.weights)).integers(-1, 2, (SIZE, SIZE)).astype(np.float32)
            self.weights[name] = numpy_helper.from_array(array, name)
        return name

    def add_node(self) -> None:
        kind = self.draw(
            st.sampled_from(["Add", "Sub", "Max", "Relu", "twice", "MatMul", "Bias", "Clip", "Dropout", "Constant"])
        )
        if kind in ("Add", "Sub"):
            self.add(kind, [self.pick(), self.pick()])
        elif kind == "Max":
            self.add(kind, [self.pick() for _ in range(self.draw(st.integers(1, 3)))])
        elif kind in ("Relu", "twice"):
            self.add(kind, [self.pick()])
        elif kind in ("MatMul", "Bias"):
            self.add(kind.replace("Bias", "Add"), [self.pick(), self.weight()])
        elif kind == "Clip":  # the lower bound is left out
            self.weights["top"] = numpy_helper.from_array(np.array(9, np.float32), "top")
            self.add(kind, [self.pick(), "", "top"])
        elif kind == "Dropout":  # its mask may be left out
            mask = self.draw(st.sampled_from([f"{self.name()}mask", "", None]))
            self.add(kind, [self.pick()], [self.name()] if mask is None else [self.name(), mask])
            if mask:
                self.add("Cast", [mask], to=TensorProto.FLOAT)
        else:
            array = np.full((SIZE, SIZE), self.draw(st.integers(-2, 2)), np.float32)
            self.add(kind, [], value=numpy_helper.from_array(array))


@st.composite
def random_graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Draw a model: shared weights, several readers, unused inputs, names that are left out, outputs of every kind."""
    inputs = [f"x{index}" for index in range(draw(st.integers(1, 3)))]
    builder = Builder(draw, [], list(inputs), {})
    for _ in range(draw(st.integers(0, 9))):
        builder.add_node()
    outputs = draw(
        st.lists(
            st.sampled_from([*builder.values[::-1], *[w for w in builder.weights if w[0] == "w"]]),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    listed = [name for name in builder.weights if name[0] == "w" and draw(st.booleans())]
    graph = helper.make_graph(
        builder.nodes,
        "random",
        *(
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE, SIZE]) for name in names]
            for names in ([*inputs, *listed], outputs)
        ),
        list(builder.weights.values()),
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[parser.parse_function(TWICE)], ir_version=8)


def place_anywhere(state: tiny.State, random: Random) -> tiny.State:
    """Place each node on any device, in any order in which they can run."""
    model, devices = state[tiny.Model], len(state.target.devices)
    waiting, order = set(range(len(model.nodes))), list[int]()
    while waiting:
        missing = {value for node in waiting for value in model.makes[node]}
        ready = sorted(node for node in waiting if not missing & {*model.reads[node]})
        order.append(random.choice(ready))
        waiting.remove(order[-1])
    device = tuple(random.randrange(devices) for _ in model.nodes)
    schedule = tiny.Schedule(tuple(order), tiny.simulate(state, device, order))
    return state.with_facts(tiny.Placement(device), schedule)


def make_target(random: Random) -> tiny.Target:
    devices = tuple(tiny.Device(f"cpu:{number}", 1 << 30) for number in range(random.randint(1, 3)))
    return tiny.Target(devices, random.choice([0.0, 0.5, 3.0]), random.choice([32.0, 1e9]))


def draw_seconds(random: Random, count: int) -> tuple[float, ...]:
    return tuple(random.choice([0.0, 0.25, 1.0, 2.5]) for _ in range(count))


def assert_programs_end(state: tiny.State) -> None:
    """Follow the programs by turns, without computing: each step finds its values, none waits forever."""
    segments, model = state[tiny.Segments].segments, state[tiny.Model]
    programs = [list(program) for program in state[tiny.Segments].programs]
    inputs = {item.name for item in model.inputs}
    values, sent = [set(inputs) for _ in programs], set[tuple[str, int]]()
    while any(programs):
        lengths = [len(program) for program in programs]
        for home, program in enumerate(programs):
            while program and (program[0].op != "receive" or (program[0].value, home) in sent):
                step = program.pop(0)
                if step.op == "run":
                    assert segments[step.segment].device == home
                    assert values[home] >= {*segments[step.segment].inputs}
                    values[home] |= {*segments[step.segment].outputs}
                elif step.op == "send":
                    assert step.value in values[home]
                    assert (step.value, step.peer) not in sent
                    sent.add((step.value, step.peer))
                elif step.op == "receive":
                    sent.remove((step.value, home))
                    values[home].add(step.value)
                else:
                    values[home].remove(step.value)
        assert lengths != [len(program) for program in programs], "each device waits for another"
    assert not sent
    assert all(held <= inputs | {*model.outputs} for held in values)


def assert_the_real_simulator_agrees(state: tiny.State) -> None:
    model, costs, target = state[tiny.Model], state[tiny.Profile], state.target
    values = [*(item.name for item in model.inputs), *(value for values in model.makes for value in values)]
    graph = OpGraph(
        names=tuple(f"n{node}" for node in range(len(model.nodes))),
        ops=tuple(node.op_type for node in model.nodes),
        value_names=tuple(values),
        value_bytes=np.array([costs.size_bytes[value] for value in values], np.int64),
        producer=np.array([model.producer.get(value, -1) for value in values], np.int32),
        is_output=np.array([value in model.outputs for value in values]),
        alias=np.full(len(values), -1, np.int32),
        inputs=Csr.of([[values.index(value) for value in row] for row in model.reads]),
        weight_names=(),
        weight_bytes=np.zeros(0, np.int64),
        weights=Csr.of([[] for _ in model.nodes]),
        workspace_bytes=np.zeros(len(model.nodes), np.int64),
    )
    ids = [device.id for device in target.devices]
    links = [Link(a, b, target.latency_seconds, target.bytes_per_second) for a in ids for b in ids if a != b]
    real = Target(tuple(Device(name, 1 << 40) for name in ids), tuple(links), "duplex")
    seconds = np.array([costs.seconds] * len(ids))
    device, order = np.array(state[tiny.Placement].device, np.int32), np.array(state[tiny.Schedule].order, np.int32)
    expected, predicted = simulate(graph, seconds, real, device, order), state[tiny.Schedule].simulation
    assert predicted.makespan_seconds == pytest.approx(expected.makespan_seconds)
    starts = [predicted.start_seconds[node] for node in range(len(model.nodes))]
    assert starts == pytest.approx(expected.start_seconds.tolist())
    for (value, home), arrival in expected.transfers.list_arrivals().items():
        assert predicted.arrival_seconds[values[value], home] == pytest.approx(arrival)


@settings(max_examples=2000)
@given(st.randoms(use_true_random=True))
def test_programs_of_any_placement_end_and_take_as_long_as_the_real_simulator_says(random: Random):
    values, nodes = ["x0", "x1"], list[onnx.NodeProto]()
    for number in range(random.randint(1, 14)):
        names = [f"v{number}", f"w{number}"][: random.randint(1, 2)]
        nodes.append(helper.make_node("Op", random.choices(values, k=random.randint(1, 3)), names))
        values += names
    outputs = tuple(sorted(set(random.choices(values, k=3))))
    inputs = tuple(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("x0", "x1"))
    model = tiny.Model(tuple(nodes), {}, inputs, outputs, onnx.ModelProto())
    costs = tiny.Profile(draw_seconds(random, len(nodes)), {value: random.choice([4, 64]) for value in values}, {})
    state = place_anywhere(tiny.State(make_target(random)).with_facts(model, costs), random)
    note(f"{nodes} {outputs} {state[tiny.Placement]} {state[tiny.Schedule]}")
    assert_programs_end(tiny.split(state))
    if len(state.target.devices) < 3:  # of more devices, two that send to a third share its channel in the real thing
        assert_the_real_simulator_agrees(state)


@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
@given(random_graphs(), st.randoms(use_true_random=True))
def test_random_models_give_the_same_bits_on_any_devices_in_any_order(proto: onnx.ModelProto, random: Random):
    note(printer.to_text(proto))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(proto, folder / "model.onnx")
        state = tiny.profile(tiny.State(make_target(random)).with_facts(tiny.load(folder / "model.onnx")))
        model, costs = state[tiny.Model], state[tiny.Profile]
        state = state.with_facts(replace(costs, seconds=draw_seconds(random, len(model.nodes))))
        state = random.choice([tiny.m_etf, lambda state: place_anywhere(state, random)])(state)
        state = tiny.emit(tiny.split(state), folder / "tiny.bundle")
        assert_programs_end(state)
        feeds = {
            item.name: np.random.default_rng(number).integers(-3, 4, (SIZE, SIZE)).astype(np.float32)
            for number, item in enumerate(model.inputs)
        }
        outputs = tiny.InferenceSession(state[tiny.Emitted].path).run(feeds)
        whole = tiny.open_session(folder / "model.onnx")
        assert [*outputs] == [item.name for item in whole.get_outputs()]
        for output, expected in zip(outputs.values(), whole.run(None, feeds)):
            np.testing.assert_array_equal(output, expected)
