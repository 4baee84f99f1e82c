"""Placement, stages and shards prefer links inside a host: two hosts with two devices each."""

from pathlib import Path

import pytest
from onnx import parser

from onnxplace.driver.compile import compile_model
from onnxplace.facts import Segments
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.hosts import split_host
from onnxplace.target.target import Device, Link, Target
from tests.support.chains import mlp

DEVICES = ("a/cpu:0", "a/cpu:1", "b/cpu:0", "b/cpu:1")
LAYERS = 5


def make_target(latency_seconds: float, bytes_per_second: float) -> Target:
    """Return a target whose links inside a host cost almost nothing, with this link between the hosts."""
    devices = tuple(
        Device(name, 1 << 32, cores=64, segment_seconds=1e-7, operations_per_second=1e11) for name in DEVICES
    )
    pairs = [(one, other) for one in devices for other in devices if one is not other and one.host == other.host]
    near = tuple(Link(one.id, other.id, 1e-7, 1e11) for one, other in pairs)
    far = tuple(Link(one, other, latency_seconds, bytes_per_second) for one, other in (("a", "b"), ("b", "a")))
    return Target(devices, (*near, *far))


def list_crossings(programs) -> list[str]:
    """Return the values that a program sends to another host."""
    return [
        step.value
        for device, steps in programs.items()
        for step in steps
        if step.op == "send" and split_host(step.peer)[0] != split_host(device)[0]
    ]


def place(text: str, placer: str) -> tuple[list[str], int]:
    """Return what crosses hosts when a model is placed by estimated costs, and the number of devices that work."""
    target = make_target(1e-3, 1e9)
    passes = f"optimize,profile{{estimate=true}},coplace{{join=never}},fuse,{placer},split"
    state, _ = Pipeline.parse(passes).run(State(target).with_facts(bind(load(parser.parse_model(text)), {}, {})))
    names = [device.id for device in target.devices]
    crossings = []
    for device, program in zip(names, state[Segments].programs):
        for step in program:
            if step.op == "send" and split_host(step.peer)[0] != split_host(device)[0]:
                crossings.append(step.value)
    return crossings, len({segment.device for segment in state[Segments].segments})


def test_towers_that_exchange_values_in_each_layer_share_a_host():
    lines, values = [], ["x"] * 4
    for layer in range(LAYERS):
        lines += [f"m{layer}{tower} = MatMul({value}, w)" for tower, value in enumerate(values)]
        lines += [f"h{layer}{tower} = Add(m{layer}{tower}, m{layer}{tower ^ 1})" for tower in range(4)]
        values = [f"h{layer}{tower}" for tower in range(4)]
    lines += [f"left = Add({values[0]}, {values[1]})", f"right = Add({values[2]}, {values[3]})", "y = Add(left, right)"]
    header = '<ir_version: 8, opset_import: ["": 17]> towers (float[512, 512] x, float[512, 512] w)'
    crossings, used = place(
        f"{header} => (float[512, 512] y) {{ {' '.join(lines)} }}", "auto{seconds=0,proposals=2000}"
    )
    assert used == 4
    assert len(crossings) == 1  # one half of the result


def test_a_pipeline_of_four_stages_crosses_hosts_once():
    weights = ", ".join(f"float[512, 512] w{index}" for index in range(16))
    nodes = " ".join(f"h{index + 1} = MatMul(h{index}, w{index})" for index in range(16))
    header = f'<ir_version: 8, opset_import: ["": 17]> chain (float[512, 512] h0, {weights})'
    crossings, used = place(f"{header} => (float[512, 512] h16) {{ {nodes} }}", "pipelined")
    assert used == 4
    assert len(crossings) == 1


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(("link", "ways"), [((1e-1, 1e8), 2), ((1e-7, 1e11), 4)])
def test_operators_are_split_inside_a_host_unless_the_network_is_as_quick(tmp_path: Path, monkeypatch, link, ways):
    monkeypatch.chdir(tmp_path)
    bundle = compile_model(mlp(), "out", target=make_target(*link), trial=False, force=True, costs=None).bundle
    sharding = bundle.manifest.sharding
    assert sharding is not None
    assert sharding.ways == ways
    crossings = list_crossings(bundle.manifest.programs)
    assert bool(crossings) == (ways == 4)
