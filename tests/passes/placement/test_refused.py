"""Nodes that a device refuses: no placer puts them there, what should share a device does so only where it can."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, parser

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Groups, Placement, Profile, Schedule, Shards, is_refused
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import fits_single_device, predict_single_device_seconds, single_device_seconds
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from onnxplace.testing.pass_contract import random_state
from tests.support.chains import mlp
from tests.support.refusals import list_misplaced, refuse, refuse_at_random

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[64, 64] x) => (float[64, 64] y) <float[64, 64] w = {FIRST}, float[64, 64] v = {SECOND}> {
    [product] a = MatMul (x, w)
    [erf] b = Erf (a)
    [relu] c = Relu (b)
    [last] y = MatMul (c, v)
}"""
DEVICES = Target((Device("cpu:0", 1 << 30), Device("cuda:0", 1 << 30, model="Tiny")))
FRONT = "optimize,profile{estimate=true}"


def model(text: str = MODEL) -> ModelProto:
    zeros = ", ".join(["0"] * 4096)
    return parser.parse_model(text.replace("FIRST", zeros).replace("SECOND", zeros))


def profiled(refused: tuple[str, ...] = ("erf",), target: Target = DEVICES) -> State:
    """Return the model with estimated costs, of which a GPU refuses some nodes, and for which it is fast otherwise."""
    state, _ = Pipeline.parse(FRONT).run(State(target).with_facts(bind(load(model()), {}, {})))
    profile = state[Profile]
    seconds = {name: np.full(4, 1.0 if name.startswith("cpu") else 0.01) for name in profile.seconds}
    state = state.with_facts(replace(profile, seconds=seconds))
    return refuse(state, {"cuda/Tiny": np.isin(profile.graph.names, refused)})


PLACERS = [
    "m-topo",
    "coplace,m-topo",
    "m-etf",
    "coplace{join=always},fuse,m-etf{reserve=peak}",
    "m-sct",
    "coplace,fuse{merge=runs},m-sct",
    "single",
    "multilevel{seconds=0,proposals=200}",
    "auto{seconds=0,proposals=100}",
    "coplace{join=always},fuse,auto{seconds=0,proposals=100}",
    "coplace,exact{seconds=0.1}",
    "fit{seconds=0.1}",
    "stages{seconds=0.1}",
    "stages{seconds=0.1,contiguous=false}",
    "m-etf,adjust",
    "m-sct,adjust{by=majority,join=always}",
    "single,refine{seconds=0,proposals=200}",
    "pipelined",
]


@pytest.mark.parametrize("pipeline", PLACERS)
def test_no_placer_uses_a_device_that_refuses_a_node(pipeline):
    for seed in range(6):
        state = refuse_at_random(random_state(seed, devices=1 + seed % 4, shuffled=seed % 2 > 0), seed)
        after, _ = Pipeline.parse(pipeline).run(state)
        assert list_misplaced(after) == []
        schedule = after[Schedule]
        assert schedule.lower_bound_seconds <= schedule.simulation.makespan_seconds < 1.0


@pytest.mark.parametrize("pipeline", ["auto{seconds=0,proposals=50}", "multilevel{seconds=0,proposals=50}"])
def test_a_search_is_never_worse_than_the_best_device_that_takes_every_node(pipeline):
    for seed in range(8):
        state = refuse_at_random(random_state(seed, devices=2 + seed % 3), seed)
        best = single_device_seconds(state[Profile], state.target) - [d.segment_seconds for d in state.target.devices]
        makespan = Pipeline.parse(pipeline).run(state)[0][Schedule].simulation.makespan_seconds
        assert makespan <= best.min() * (1 + 1e-9)


def test_nodes_that_other_devices_take_are_not_joined():
    groups = Pipeline.parse("coplace{join=always}").run(profiled())[0][Groups].group
    free = Pipeline.parse("coplace{join=always}").run(profiled(()))[0][Groups].group
    assert len(set(free.tolist())) == 1
    assert groups.tolist() == [0, 1, 2, 2]  # the node that the GPU refuses, and what is on both sides of it


def test_a_kernel_is_split_where_devices_refuse_a_part_of_it_and_no_note_blames_the_device_map():
    state = profiled()
    whole = state.with_facts(replace(state[Profile], unit=np.zeros(4, dtype=np.int32)))
    after, _ = Pipeline.parse("coplace{join=never}").run(whole)
    assert after[Groups].group.tolist() == [0, 1, 0, 0]
    assert after.diagnostics == state.diagnostics


def test_what_must_share_a_device_goes_where_all_of_it_is_taken():
    after, _ = Pipeline.parse("coplace{join=never,colocate=product|erf},auto{seconds=0}").run(profiled())
    assert after[Placement].device.tolist() == [0, 0, 1, 1]


def test_a_segment_is_cut_around_what_a_device_refuses():
    after, _ = Pipeline.parse("coplace,fuse,auto{seconds=0,proposals=50},split").run(profiled())
    assert after[Placement].device.tolist() == [1, 0, 1, 1]


def test_one_device_that_refuses_a_node_is_impossible():
    state = profiled()
    assert predict_single_device_seconds(state)[1] == np.inf
    assert fits_single_device(state).tolist() == [True, False]
    after, _ = Pipeline.parse("single").run(state)
    assert set(after[Placement].device.tolist()) == {0}


def test_without_a_device_for_a_node_the_error_says_which_and_what_helps():
    gpu = Target((Device("cuda:0", 1 << 30, model="Tiny"),))
    with pytest.raises(InfeasibleError, match=r"P004.*cuda:0 does not take Erf 'erf'") as error:
        Pipeline.parse("single").run(profiled(target=gpu))
    assert error.value.hint.startswith("add cpu:0 to the devices")
    assert "cuda:0{fallback=true}" in error.value.hint


def test_a_device_map_that_puts_a_node_on_a_device_which_refuses_it_is_infeasible(tmp_path: Path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({".*": "cuda:0"}))
    with pytest.raises(InfeasibleError, match=r"cuda:0 does not take Erf 'erf'") as error:
        Pipeline.parse(f"coplace{{device_map={path}}},auto").run(profiled())
    assert error.value.hint.startswith("put it on cpu:0")


def test_copies_and_stages_on_several_devices_need_devices_that_take_their_nodes():
    three = Target((*DEVICES.devices, Device("cpu:1", 1 << 30)))
    Pipeline.parse("single,split,replicate{routes=cpu:1}").run(profiled(target=three))
    with pytest.raises(InfeasibleError, match=r"replicate: cuda:0 does not take Erf 'erf'"):
        Pipeline.parse("single,split,replicate{routes=cuda:0}").run(profiled(target=three))
    with pytest.raises(InfeasibleError, match=r"no stage on 2 devices can hold Erf 'erf'"):
        Pipeline.parse("stages{seconds=0.1,replicas=2}").run(profiled(target=three))


def test_operators_are_split_only_over_devices_that_take_every_node():
    devices = Target((*DEVICES.devices, Device("cpu:1", 1 << 30)))
    state = State(devices).with_facts(bind(load(mlp()), {}, {}))
    state, _ = Pipeline.parse(FRONT).run(state)
    refused = refuse(state, {"cuda/Tiny": np.arange(len(state[Profile].graph)) == 0})
    after, _ = Pipeline.parse("shard{exact=true}").run(refused)
    assert set(after[Shards].device.tolist()) == {0, 2}
    assert not is_refused(after[Profile].seconds["cpu/1"]).any()
    alone, _ = Pipeline.parse("shard{ways=2}").run(profiled())
    assert [note.message for note in alone.diagnostics if note.code == "P064"] == [
        "no operator is split: fewer than two devices take every node"
    ]
