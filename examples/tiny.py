r"""Read this first: onnxplace in one file, from an ONNX model to two devices that compute it together.

    python examples/tiny.py [MODEL.onnx]

    model.onnx --load--> State --profile--> costs --m_etf--> devices, order --split--> programs --emit--> tiny.bundle

         x
       /   \           cpu:0  |   run 0: left branch   | send a |
    left   right                                              \
       \   /                                                   `---.
        sum                                                         v
         |             cpu:1  |   run 1: right branch         | receive a | run 2: sum |  -> y
         y                                                                                       time -->

A `State` holds what is known about a model, as facts. A pass takes a state and returns one with more facts; nothing is
altered. The passes are here in the order in which they run, then what runs their result: read from top to bottom.

Parts have the names of the real ones, and a comment at the end of each says where that is, and why it is longer. Here a
model has static shapes and no control flow, and a device is a core of this machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser

Array = NDArray[Any]
Fact = TypeVar("Fact")

# -- Devices, and the State that flows through the passes --------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What computes: here a core, with its share of the memory."""

    id: str
    memory_bytes: int


@dataclass(frozen=True)
class Target:
    """The devices, and how fast a value gets from one to another."""

    devices: tuple[Device, ...]
    latency_seconds: float = 5e-5  # a thread hands over a reference, and another one wakes up
    bytes_per_second: float = 1e10

    def transfer_seconds(self, size_bytes: int) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second

    # In the real thing: onnxplace/target. Each link by itself, devices of different speed, files, machines by name.


@dataclass(frozen=True)
class State:
    """What is known about a model on a target: facts, by their class."""

    target: Target
    facts: Mapping[type, Any] = field(default_factory=dict)

    def __getitem__(self, kind: type[Fact]) -> Fact:
        fact: Fact = self.facts[kind]
        return fact

    def with_facts(self, *facts: Any) -> State:
        return replace(self, facts={**self.facts, **{type(fact): fact for fact in facts}})

    # In the real thing: onnxplace/state.py. Passes are classes that declare which facts they read and add.


# -- Load: a file becomes a model in one normal form -------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A fact. A node is its position in `nodes`; a value is its name. Weights are not values: they never move."""

    nodes: tuple[NodeProto, ...]  # each after those that it needs
    weights: Mapping[str, TensorProto]
    inputs: tuple[ValueInfoProto, ...]
    outputs: tuple[str, ...]
    file: ModelProto

    @cached_property
    def reads(self) -> list[list[str]]:
        """By node, the values that it reads; an optional one that is left out has the name ""."""
        return [
            [name for name in dict.fromkeys(node.input) if name and name not in self.weights] for node in self.nodes
        ]

    @cached_property
    def makes(self) -> list[list[str]]:
        """By node, the values that it makes."""
        return [[name for name in node.output if name] for node in self.nodes]

    @cached_property
    def stored(self) -> list[list[str]]:
        """By node, the weights that it needs."""
        return [[name for name in dict.fromkeys(node.input) if name in self.weights] for node in self.nodes]

    @cached_property
    def producer(self) -> dict[str, int]:
        """By value, the node that makes it; inputs of the model are not in here."""
        return {value: node for node, values in enumerate(self.makes) for value in values}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """By value that a node makes, the nodes that read it."""
        return {value: [node for node, reads in enumerate(self.reads) if value in reads] for value in self.producer}

    def proto(self, nodes: Sequence[int], inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> ModelProto:
        """Return some of the nodes as a model, with the weights that they read."""
        weights = [self.weights[name] for name in dict.fromkeys(name for node in nodes for name in self.stored[node])]
        graph = helper.make_graph([self.nodes[node] for node in nodes], "part", inputs, outputs, weights)
        imports, functions = self.file.opset_import, self.file.functions
        return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=self.file.ir_version)

    def feeds(self, seed: int) -> dict[str, Array]:
        """Return random inputs: normal floats; for other types zeros and ones, which are good indices, too."""
        random, feeds = np.random.default_rng(seed), {}
        for item in self.inputs:
            dtype = helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
            shape = [size.dim_value for size in item.type.tensor_type.shape.dim]
            is_float = np.issubdtype(dtype, np.floating)
            drawn = random.standard_normal(shape) if is_float else random.integers(0, 2, shape)
            feeds[item.name] = np.asarray(drawn, dtype)
        return feeds


def load(path: Path) -> Model:
    """Read a model: constants become weights, and nodes that no output needs are left out."""
    file = onnx.load(path)
    outputs = [item.name for item in file.graph.output]
    weights = {tensor.name: tensor for tensor in file.graph.initializer}
    inputs = tuple(item for item in file.graph.input if item.name not in weights)
    # What is measured once then holds for each run: all sizes are the same, and each node runs once.
    is_static = all(size.HasField("dim_value") for item in inputs for size in item.type.tensor_type.shape.dim)
    if not is_static or any(attribute.HasField("g") for node in file.graph.node for attribute in node.attribute):
        sys.exit("tiny.py: symbolic sizes and control flow need the real thing: onnxplace compile")
    nodes: list[NodeProto] = []
    needed = set(outputs)
    for node in reversed(file.graph.node):
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            weights[node.output[0]] = tensor = TensorProto()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        elif needed.intersection(filter(None, node.output)):
            nodes.insert(0, node)
            needed.update(node.input)
    # What the model returns has to come from a node, so a weight that it returns becomes a constant again.
    returned = [name for name in outputs if name in weights]
    nodes[:0] = [helper.make_node("Constant", [], [name], value=weights.pop(name)) for name in returned]
    return Model(tuple(nodes), weights, inputs, tuple(outputs), file)
    # In the real thing: onnxplace/model/loading.py, passes/optimize.py. Control flow, symbolic sizes, weights that stay
    # in their file, states that a decoder carries from call to call; what is constant is computed once.


# -- Profile: what each node costs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """A fact: costs."""

    seconds: tuple[float, ...]  # by node, on any device: they are alike
    size_bytes: Mapping[str, int]  # by value or weight
    types: Mapping[str, ValueInfoProto]  # by value: its element type and shape


def profile(state: State) -> State:
    """Time each node in its own session, on the values that the nodes before it made."""
    model = state[Model]
    types = {item.name: item for item in model.inputs}
    values, seconds = model.feeds(seed=0), []
    for node, (reads, makes) in enumerate(zip(model.reads, model.makes)):
        part = model.proto([node], [types[name] for name in reads], [ValueInfoProto(name=name) for name in makes])
        call = partial(open_session(part).run, makes, {name: values[name] for name in reads})
        seconds.append(measure_seconds(call))
        for name, array in zip(makes, call()):
            values[name] = array
            element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            types[name] = helper.make_tensor_value_info(name, element_type, array.shape)
    sizes = {name: numpy_helper.to_array(tensor).nbytes for name, tensor in model.weights.items()}
    sizes.update((name, array.nbytes) for name, array in values.items())
    return state.with_facts(Profile(tuple(seconds), sizes, types))
    # In the real thing: passes/profile.py. One session whose profiler tells fused nodes and calls apart, for each class
    # of devices; models larger than memory; a cache, cost files, estimates.


def open_session(model: ModelProto | Path) -> onnxruntime.InferenceSession:
    """Open a model on one core: ONNX Runtime computes it in the thread that calls."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    # In the real thing: onnxplace/machine. GPUs and NPUs, a choice of cores for each device, interrupts.


def measure_seconds(call: Callable[[], object], count: int = 5) -> float:
    """Return the median time of a call, after one to warm up."""
    return statistics.median(timeit.repeat(call, number=1, repeat=count + 1)[1:])
    # In the real thing: onnxplace/machine, too. It goes on until the median is sure, and leaves disturbed runs out.


# -- Simulate: the one model of time, for choosing and for predicting --------------------------------------------------


@dataclass(frozen=True)
class Simulation:
    """One step, as predicted."""

    start_seconds: Mapping[int, float]  # by node
    arrival_seconds: Mapping[tuple[str, int], float]  # by value and device: when it is there
    makespan_seconds: float


def simulate(state: State, device: Sequence[int], order: Sequence[int]) -> Simulation:
    """Predict a step: a device runs its nodes in the order, one at a time, and sends each value as soon as it is made.

    A link carries one value at a time. One pass is exact: what a link carries comes from one device, whose nodes finish
    in the order in which the pass takes them.
    """
    model, costs, target = state[Model], state[Profile], state.target
    device_free, link_free = [0.0] * len(target.devices), dict[tuple[int, int], float]()
    start, arrival = dict[int, float](), dict[tuple[str, int], float]()
    for node in order:
        home = device[node]
        start[node] = max([device_free[home], *(arrival.get((value, home), 0.0) for value in model.reads[node])])
        finish = device_free[home] = start[node] + costs.seconds[node]
        for value in model.makes[node]:
            arrival[value, home] = finish
            for peer in list_peers(model, device, value):
                begin = max(finish, link_free.get((home, peer), 0.0))
                link_free[home, peer] = begin + target.transfer_seconds(costs.size_bytes[value])
                arrival[value, peer] = link_free[home, peer]
    return Simulation(start, arrival, max(arrival.values(), default=0.0))
    # In the real thing: onnxplace/simulation. Senders that share a channel, so events in a loop; memory over time,
    # weights that stream, devices that slow each other down; lower bounds; compiled.


def list_peers(model: Model, device: Sequence[int], value: str) -> list[int]:
    """Return the other devices that read a value which a node makes."""
    return sorted({device[reader] for reader in model.readers[value]} - {device[model.producer[value]]})


# -- Place: a device for each node, and an order -----------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """A fact: the device of each node, as its position in the target."""

    device: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """A fact: an order of all nodes, in which each device takes its own, and the step that it promises."""

    order: tuple[int, ...]
    simulation: Simulation


def m_etf(state: State) -> State:
    """Place by earliest task first, within memory: of all ready nodes and devices, take the pair that can start first.

    A device has to hold the weights and values of all its nodes at once.
    """
    model, costs, target = state[Model], state[Profile], state.target
    needs = [{*names, *reads, *makes} for names, reads, makes in zip(model.stored, model.reads, model.makes)]
    device = dict[int, int]()  # by node, in the order in which they are placed
    made_seconds = {item.name: 0.0 for item in model.inputs}  # by value, when it is made
    free, held = [0.0] * len(target.devices), [set[str]() for _ in target.devices]

    def can_hold(node: int, home: int) -> bool:
        return sum(costs.size_bytes[name] for name in held[home] | needs[node]) <= target.devices[home].memory_bytes

    def find_start(node: int, home: int) -> float:
        arrivals = [free[home]]
        for value in model.reads[node]:
            is_elsewhere = value in model.producer and device[model.producer[value]] != home
            arrivals.append(made_seconds[value] + is_elsewhere * target.transfer_seconds(costs.size_bytes[value]))
        return max(arrivals)

    while len(device) < len(model.nodes):
        ready = [n for n, reads in enumerate(model.reads) if n not in device and made_seconds.keys() >= {*reads}]
        pairs = [(find_start(n, home), n, home) for n in ready for home in range(len(free)) if can_hold(n, home)]
        if not pairs:
            sys.exit(f"tiny.py: no device has enough memory left for {model.nodes[ready[0]].op_type}")
        start, node, home = min(pairs)  # ties: the first node, then the first device
        device[node], held[home] = home, held[home] | needs[node]
        free[home] = start + costs.seconds[node]
        made_seconds.update((value, free[home]) for value in model.makes[node])
    placement, order = Placement(tuple(device[node] for node in range(len(device)))), tuple(device)
    return state.with_facts(placement, Schedule(order, simulate(state, placement.device, order)))
    # In the real thing: passes/m_etf.py. Heaps instead of all pairs, busy links, values that are freed, nodes that have
    # to stay together. The default is passes/auto.py: the best of several placers, improved by a search.


# -- Split: segments, and a program for each device --------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Nodes that a device runs in one call, and the values that enter and leave."""

    device: int
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """A step of a program: run a segment; send a value to a peer, receive one from it, or free one."""

    op: Literal["run", "send", "receive", "free"]
    segment: int = -1
    value: str = ""
    peer: int = -1


@dataclass(frozen=True)
class Segments:
    """A fact: all segments, and the program of each device."""

    segments: tuple[Segment, ...]
    programs: tuple[tuple[Instruction, ...], ...]


def split(state: State) -> State:
    """Cut the nodes of each device into segments, and write the programs."""
    segments = describe_segments(state, cut_into_segments(state))
    return state.with_facts(Segments(segments, write_programs(state, segments)))
    # In the real thing: passes/split.py, passes/segments, which have the three functions below.


def cut_into_segments(state: State) -> list[list[int]]:
    """Return the nodes of each segment.

    A session takes its inputs when it begins and returns its outputs when it ends. So a segment

    1. ends after a node whose value another device reads, and
    2. begins before a node for whose inputs the nodes before it would have to wait.

    By rule 1 no device waits forever. Order the segments by their last nodes: each device runs its own in that order. A
    segment waits for the last node of another, which is scheduled before the node that reads its value. So it only
    waits for segments before it, and the first that is not done can always run.
    """
    model, device, schedule = state[Model], state[Placement].device, state[Schedule]
    segments, open_segments = list[list[int]](), dict[int, list[int]]()
    for node in schedule.order:
        home = device[node]
        remote = [v for v in model.reads[node] if v in model.producer and device[model.producer[v]] != home]
        ready_seconds = max((schedule.simulation.arrival_seconds[value, home] for value in remote), default=0.0)
        segment = open_segments.get(home)
        if segment is None or ready_seconds > schedule.simulation.start_seconds[segment[0]]:
            segment = open_segments[home] = []
            segments.append(segment)
        segment.append(node)
        if any(list_peers(model, device, value) for value in model.makes[node]):
            del open_segments[home]
    return segments
    # In the real thing: neighbours are joined where the step gets no longer, what ONNX Runtime fuses stays whole, and
    # more is cut where memory is short (docs/decisions/0004-segments.md).


def describe_segments(state: State, cuts: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    """Find out what enters each segment and what leaves it."""
    model, segments = state[Model], []
    for nodes in cuts:
        made_values = dict.fromkeys(value for node in nodes for value in model.makes[node])
        read_values = dict.fromkeys(value for node in nodes for value in model.reads[node])
        inputs = [value for value in read_values if value not in made_values]
        outputs = [name for name in made_values if name in model.outputs or not {*model.readers[name]} <= {*nodes}]
        segments.append(Segment(state[Placement].device[nodes[0]], tuple(nodes), tuple(inputs), tuple(outputs)))
    return tuple(segments)


def write_programs(state: State, segments: Sequence[Segment]) -> tuple[tuple[Instruction, ...], ...]:
    """Write each device's program: it receives a value before its first reader, and sends one after its producer."""
    model, device = state[Model], state[Placement].device
    last_reader = {(value, item.device): number for number, item in enumerate(segments) for value in item.inputs}
    # By value and device: what is there when the next segment begins. The caller gives its inputs to all devices.
    present = {(value.name, home) for value in model.inputs for home in range(len(state.target.devices))}
    programs: list[list[Instruction]] = [[] for _ in state.target.devices]
    for number, segment in enumerate(segments):
        home, program = segment.device, programs[segment.device]
        for value in segment.inputs:
            if (value, home) not in present:
                program.append(Instruction("receive", value=value, peer=device[model.producer[value]]))
        program.append(Instruction("run", segment=number))
        for value in segment.outputs:
            program += [Instruction("send", value=value, peer=peer) for peer in list_peers(model, device, value)]
        present.update((value, home) for value in (*segment.inputs, *segment.outputs))
        for value in (*segment.inputs, *segment.outputs):  # each is freed after its last reader here, if it has one
            if last_reader.get((value, home), number) == number and value not in model.outputs:
                program.append(Instruction("free", value=value))
    return tuple(tuple(program) for program in programs)
    # In the real thing: values leave in the order in which other devices wait for them.


# -- Emit: a folder that says all there is to know ---------------------------------------------------------------------


@dataclass(frozen=True)
class Emitted:
    """A fact: where the bundle is."""

    path: Path


def emit(state: State, path: Path) -> State:
    """Write the bundle: an ONNX file for each segment, and a manifest that says how to run them."""
    model, types, segments = state[Model], state[Profile].types, state[Segments].segments
    path.mkdir(exist_ok=True)
    files = [f"segment-{number:03d}.onnx" for number in range(len(segments))]
    for file, segment in zip(files, segments):
        inputs, outputs = ([types[value] for value in values] for values in (segment.inputs, segment.outputs))
        onnx.save(model.proto(segment.nodes, inputs, outputs), path / file)
    programs = [[asdict(step) for step in program] for program in state[Segments].programs]
    devices = [device.id for device in state.target.devices]
    manifest = {"outputs": model.outputs, "segments": files, "devices": devices, "programs": programs}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return state.with_facts(Emitted(path))
    # In the real thing: passes/emit.py, onnxplace/bundle. Each weight once, hashes, a schema, what was predicted; the
    # folder appears when it is complete, and its programs are checked before they run.


# -- Run: a thread for each device follows its program -----------------------------------------------------------------


class InferenceSession:
    """A bundle that is open. Nothing is left to decide: the programs say it all."""

    def __init__(self, path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        self.outputs: list[str] = manifest["outputs"]
        self.segments = [open_session(path / file) for file in manifest["segments"]]
        self.programs = [[Instruction(**step) for step in program] for program in manifest["programs"]]
        self.workers = [ThreadPoolExecutor(1, thread_name_prefix=device) for device in manifest["devices"]]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Let the devices follow their programs for one request, and return the outputs of the model."""
        sends = [(step.value, step.peer) for program in self.programs for step in program if step.op == "send"]
        transfers: dict[tuple[str, int], Future[Array]] = {key: Future() for key in sends}
        parts = [self.workers[d].submit(self.follow_program, d, feeds, transfers) for d in range(len(self.workers))]
        done, _ = wait(parts, return_when=FIRST_EXCEPTION)
        for transfer in transfers.values():
            transfer.cancel()  # only matters if a device failed: those that wait for it wake up
        values = {name: array for part in done for name, array in part.result().items()}
        return {name: values[name] for name in self.outputs}
        # In the real thing: onnxplace/session/inference_session.py, runtimes/execution/engine.py. Many requests in
        # flight, time limits, interrupts, states that stay on their devices, several hosts.

    def follow_program(
        self, device: int, feeds: Mapping[str, Array], transfers: Mapping[tuple[str, int], Future[Array]]
    ) -> dict[str, Array]:
        """Follow the program of a device, and return the values that it has at the end."""
        values = dict(feeds)
        for step in self.programs[device]:
            if step.op == "receive":
                values[step.value] = transfers[step.value, device].result()  # waits; nothing else does
            elif step.op == "run":
                session = self.segments[step.segment]
                outputs = session.run(None, {item.name: values[item.name] for item in session.get_inputs()})
                values.update(zip([item.name for item in session.get_outputs()], outputs))
            elif step.op == "send":
                transfers[step.value, step.peer].set_result(values[step.value])
            elif step.op == "free":
                del values[step.value]
        return values
        # In the real thing: runtimes/execution/programs.py. Values in the memory of devices, copies next to computing,
        # weights that stream, requests that end early, a timeline.


# -- All of it ---------------------------------------------------------------------------------------------------------


def compile_model(path: Path, target: Target, bundle: Path) -> State:
    """Take a model through the passes, from its file to its bundle."""
    state = State(target).with_facts(load(path))
    for run_pass in (profile, m_etf, split, partial(emit, path=bundle)):
        state = run_pass(state)
    return state
    # In the real thing: onnxplace/driver, onnxplace/pipeline. Strategies are compared (one device, placed or split
    # operators, copies, stages), and a trial tells whether the bundle is faster than one device.


def verify(bundle: InferenceSession, against: Path, feeds: Mapping[str, Array]) -> None:
    """Raise AssertionError if an output differs from that of the whole model in one session."""
    whole, outputs = open_session(against), bundle.run(feeds)
    for item, expected in zip(whole.get_outputs(), whole.run(None, feeds)):
        rounding = 1e-5 * np.abs(expected[np.isfinite(expected)]).max(initial=0)
        np.testing.assert_allclose(outputs[item.name], expected, rtol=1e-4, atol=rounding, err_msg=item.name)
    # In the real thing: onnxplace/session/verification.py. Several sizes, carried states, the precision of each device.


def build_two_branches() -> ModelProto:
    """Build the model of the picture: neither branch needs the other."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    two_branches (float[128, 768] x) => (float[128, 768] y) {
        left = MatMul(x, w0)    right = MatMul(x, w1)
        c = Relu(left)          d = Tanh(right)
        a = MatMul(c, w2)       b = MatMul(d, w3)
        y = Add(a, b)
    }""")
    weights = np.random.default_rng(0).standard_normal((4, 768, 768), np.float32) / 28
    model.graph.initializer.extend(numpy_helper.from_array(array, f"w{n}") for n, array in enumerate(weights))
    return model


def main() -> None:
    """Compile a model for two cores, run it, and print what was predicted next to what is measured."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "two_branches.onnx")
    if len(sys.argv) == 1:
        onnx.save(build_two_branches(), path)
    target = Target((Device("cpu:0", memory_bytes=2**32), Device("cpu:1", memory_bytes=2**32)))
    state = compile_model(path, target, Path("tiny.bundle"))
    for device, program in zip(target.devices, state[Segments].programs):
        steps = [f"{step.op} {step.value or step.segment}" for step in program]
        print(f"{device.id}: {textwrap.shorten(', '.join(steps) or 'idle', 110)}")

    session, feeds = InferenceSession(state[Emitted].path), state[Model].feeds(seed=1)
    verify(session, path, feeds)
    print("all outputs equal those of one session")
    calls = partial(open_session(path).run, None, feeds), partial(session.run, feeds)
    predicted = sum(state[Profile].seconds), state[Schedule].simulation.makespan_seconds
    for name, seconds, call in zip(("one device", "two devices"), predicted, calls):
        print(f"{name}: predicted {seconds * 1e3:.2f} ms, measured {measure_seconds(call) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
