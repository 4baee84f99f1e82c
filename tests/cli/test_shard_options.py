"""`onnxplace compile --shard`, `--shard-map`, and `onnxplace plan`, as a user runs them."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.bundle.manifest import SplitStateRecord
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.step_inputs import choose_step_inputs
from onnxplace.measure.trial import run_trials
from onnxplace.runtimes.execution.sessions import EngineSession
from onnxplace.utils.ort import import_onnxruntime
from tests.support.chains import cached_decoder, exported_decoder, mlp
from tests.support.commands import only_json
from tests.support.state_checks import STATES, sums

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

EXACT = "optimize,profile{estimate=true},shard{ways=2,exact=true},coplace{join=never},fuse,m-etf,split,emit"


@pytest.fixture
def chain() -> str:
    Path("chain.onnx").write_bytes(mlp().SerializeToString())
    return "chain.onnx"


def compile_exactly(run_cli, model: str, pipeline: str = EXACT, *options: str) -> onnxplace.Bundle:
    assert run_cli("compile", model, "--pipeline", pipeline, "-o", "out", "--force", *options).code == 0
    return onnxplace.load("out", "all")


def test_operators_are_split_and_the_bundle_computes_the_same(run_cli, chain):
    bundle = compile_exactly(run_cli, chain)
    sharding = bundle.manifest.sharding
    assert sharding is not None
    assert sharding.ways == 2
    assert {kind.layout for kind in sharding.kinds if kind.op == "MatMul"} - {"whole"}
    assert run_cli("verify", "out", "--against", chain).code == 0
    assert run_cli("verify", "out").code == 0


def test_the_summary_says_what_was_split_how(run_cli, chain):
    result = run_cli("compile", chain, "--pipeline", EXACT, "-o", "out")
    assert "operators split over 2 devices:" in result.out
    assert "MatMul (" in result.out
    assert "note[P060]" not in result.err, "the summary has it"
    assert "note[P060]" in run_cli("compile", chain, "--pipeline", EXACT, "-o", "out", "--force", "-v").err


def test_json_holds_the_sharding(run_cli, chain):
    data = only_json(run_cli("compile", chain, "--pipeline", EXACT, "-o", "out", "--json"))
    assert data["sharding"]["ways"] == 2
    assert set(data["sharding"]) == {"ways", "stages", "exchanges", "kinds", "states"}


@pytest.mark.parametrize("ways", [2, 3])
def test_shard_n_uses_at_most_n_devices(run_cli, chain, ways):
    devices = "cpu:0,cpu:1,cpu:2"
    options = ("--devices", devices, "--shard", str(ways), "--no-trial", "--max-memory", "64MiB")
    data = only_json(run_cli("compile", chain, *options, "-o", "out", "--json"))
    assert data["sharding"] is None or data["sharding"]["ways"] <= ways
    assert run_cli("verify", "out", "--against", chain).code == 0


def test_shard_off_leaves_operators_whole(run_cli, chain):
    data = only_json(run_cli("compile", chain, "--shard", "off", "--no-trial", "-o", "out", "--json"))
    assert data["sharding"] is None
    assert "shard" not in data["pipeline"]


def test_by_default_placing_and_sharding_are_compared(run_cli, chain):
    data = only_json(run_cli("compile", chain, "--no-trial", "-o", "out", "--json"))
    codes = {note["code"] for note in data["diagnostics"]}
    assert codes & {"P062", "P064"} or data["sharding"] is None
    assert run_cli("verify", "out", "--against", chain).code == 0


def test_the_pipeline_of_a_sharded_bundle_compiles_the_same_again(run_cli, chain):
    first = compile_exactly(run_cli, chain)
    second = compile_exactly(run_cli, chain, first.manifest.pipeline)
    assert second.manifest.sharding == first.manifest.sharding
    assert second.manifest.files.keys() == first.manifest.files.keys()


def test_the_costs_in_a_sharded_bundle_are_those_of_the_model(run_cli, chain):
    compile_exactly(run_cli, chain)
    pipeline = "optimize,profile{costs=out/costs.json},coplace{join=never},m-etf,split,emit"
    assert run_cli("compile", chain, "--pipeline", pipeline, "-o", "again").code == 0


def test_least_weights_stores_each_byte_once_and_halves_what_a_device_holds(run_cli, chain):
    pipeline = EXACT.replace("exact=true", "exact=true,weights=least")
    bundle = compile_exactly(run_cli, chain, pipeline)
    whole = sum(np.prod(t.dims) * 4 for t in onnx.load(chain).graph.initializer)
    held = [device.weights_bytes for device in bundle.manifest.devices]
    assert max(held) <= 0.51 * whole
    assert bundle.file("segments/weights.bin").stat().st_size <= 1.02 * whole
    assert run_cli("verify", "out").code == 0


def test_a_model_that_fits_no_device_runs_in_parts(run_cli):
    Path("chain.onnx").write_bytes(mlp(layers=1).SerializeToString())
    options = ("--objective", "fit", "--max-memory", "3400KiB", "--no-trial", "-o", "out")
    assert run_cli("compile", "chain.onnx", "--shard", "off", *options).code in (0, 3)
    data = only_json(run_cli("compile", "chain.onnx", *options, "--force", "--json"))
    assert all(device["peak_bytes"] <= device["limit_bytes"] for device in data["devices"])
    assert run_cli("verify", "out").code == 0


def test_values_that_no_device_holds_are_split(run_cli):
    # Relu reads and makes 2 MiB: no placement of whole operators fits.
    Path("wide.onnx").write_bytes(mlp(layers=1, rows=512, width=128).SerializeToString())
    options = ("--max-memory", "3600KiB", "-o", "out", "--force", "--json")
    pipeline = EXACT.replace("{ways=2,exact=true}", "")
    assert run_cli("compile", "wide.onnx", "--pipeline", pipeline.replace("shard,", ""), *options).code == 3
    data = only_json(run_cli("compile", "wide.onnx", "--pipeline", pipeline, *options))
    assert data["sharding"]["ways"] == 2
    assert all(device["peak_bytes"] <= device["limit_bytes"] for device in data["devices"])
    assert run_cli("verify", "out", "--against", "wide.onnx").code == 0


def test_a_map_decides_how_nodes_are_split(run_cli, chain):
    shard = r'shard{ways=2,exact=true,map="{\"layer.*up\": \"columns\", \"layer.*down\": \"sum\"}"}'
    bundle = compile_exactly(run_cli, chain, EXACT.replace("shard{ways=2,exact=true}", shard))
    assert bundle.manifest.sharding is not None
    layouts = {(kind.op, kind.layout): kind.count for kind in bundle.manifest.sharding.kinds}
    assert layouts["MatMul", "axis 1"] == 3
    assert layouts["MatMul", "summed axis"] == 3
    assert run_cli("verify", "out").code == 0


def test_a_map_may_be_a_file(run_cli, chain):
    Path("map.json").write_text(json.dumps({"layer0.*": "whole", "layer1_up": "columns"}))
    result = run_cli("compile", chain, "--shard-map", "map.json", "--no-trial", "-o", "out")
    assert result.code == 0
    assert run_cli("verify", "out").code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shard-map", '{"nothing.*": "columns"}'), ("U020", "nothing.*", "layer0_up")),
        (("--shard-map", '{"layer0_act": "sum"}'), ("U023", "layer0_act", "it can be")),
        (("--shard-map", '{"layer0_up": "diagonal"}'), ("U023", "diagonal", "columns")),
        (("--shard-map", '{"layer0_up": "axis 7"}'), ("U023", "layer0_up", "axis 7")),
        (("--shard-map", f'{{"layer0_up": "axis {"9" * 5000}"}}'), ("U023", "'axis 999", "'axis 1'")),
        (("--shard-map", '{"layer0_up": "axis ١"}'), ("U023", "'axis ١'")),
        (("--shard-map", '{"layer0_up": 3}'), ("U023", "expected a map")),
        (("--shard-map", "{"), ("U023", "JSON")),
        (("--shard-map", "missing.json"), ("U023", "missing.json")),
        (("--shard", "both"), ("U005", "both", "auto")),
        (("--shard", "0"), ("U005", "0")),
        (("--shard", "٢"), ("U005", "٢")),
        (("--shard", "9" * 5000), ("U005", "99...")),
        (("--shard", "-2"), ("U005", "-2")),
        (("--shard", "off", "--shard-map", '{"layer0_up": "columns"}'), ("U042", "--shard off")),
        (("--shard", "2", "--pipeline", EXACT), ("U042", "--pipeline")),
        (("--shard", "2", "--colocate", "layer.*"), ("U042", "--colocate")),
        (("--shard", "2", "--device-map", "map.json"), ("U042", "--device-map")),
        (("--pipeline", EXACT.replace("ways=2", "ways=2,stages=3")), ("U075", "3 stages")),
    ],
)
def test_wrong_wishes_are_refused_by_name_and_leave_nothing(run_cli, chain, options, words):
    result = run_cli("compile", chain, *options, "-o", "out")
    assert result.code == 2
    for word in words:
        assert word in result.err
    assert not Path("out").exists()


def test_more_ways_than_devices_is_a_note(run_cli, chain):
    result = run_cli("compile", chain, "--shard", "8", "--no-trial", "-o", "out")
    assert result.code == 0
    assert "note[U075]" in result.err


def test_more_ways_than_heads_leaves_heads_together(run_cli):
    Path("decoder.onnx").write_bytes(cached_decoder(heads=2).SerializeToString())
    pipeline = EXACT.replace("ways=2", "ways=3")
    shape = ("--shape", "seq=1,past=5", "--devices", "cpu:0,cpu:1,cpu:2")
    compile_exactly(run_cli, "decoder.onnx", pipeline, *shape)
    assert run_cli("verify", "out", "--against", "decoder.onnx").code == 0


@pytest.mark.parametrize("ways", [2, 4])
def test_a_cache_is_split_by_heads_and_decodes_the_same(run_cli, ways):
    model = cached_decoder()
    Path("decoder.onnx").write_bytes(model.SerializeToString())
    devices = ",".join(f"cpu:{index}" for index in range(ways))
    shape = ("--shape", "seq=1,past=5", "--devices", devices, "--state", "present=past")
    bundle = compile_exactly(run_cli, "decoder.onnx", EXACT.replace("ways=2", f"ways={ways},weights=least"), *shape)
    assert bundle.manifest.sharding is not None
    (state,) = bundle.manifest.sharding.states
    assert state.axis == 1
    assert len(state.inputs) == ways
    session = import_onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    past = random.standard_normal((1, 4, 3, 16)).astype(np.float32)
    with onnxplace.InferenceSession(bundle) as parts:
        for step in range(6):
            x = random.standard_normal((1, 1 + step % 2, 64)).astype(np.float32)
            expected, expected_past = session.run(None, {"x": x, "past": past})
            feeds = {"x": x, "past": past} if step == 0 else {"x": x}
            actual, present = parts.run(["y", "present"], feeds)
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(present, expected_past, rtol=1e-4, atol=1e-5)
            past = expected_past
        parts.reset_state()
        zeros = parts.run(None, {"x": x, **bundle.zero_states(past=0)})
        np.testing.assert_allclose(
            zeros[0], session.run(None, {"x": x, "past": past[:, :, :0]})[0], rtol=1e-4, atol=1e-5
        )
    assert run_cli("verify", "out", "--steps", "3").code == 0
    assert run_cli("verify", "out", "--steps", "3", "--against", "decoder.onnx").code == 0


def test_a_trial_takes_whole_states_for_a_bundle_that_holds_them_in_parts(run_cli):
    Path("decoder.onnx").write_bytes(cached_decoder().SerializeToString())
    shape = ("--shape", "seq=1,past=5", "--state", "present=past")
    bundle = compile_exactly(run_cli, "decoder.onnx", EXACT.replace("ways=2", "ways=2,weights=least"), *shape)
    feeds = {"x": np.zeros((1, 1, 64), np.float32), "past": np.zeros((1, 4, 5, 16), np.float32)}
    (trial,) = run_trials([bundle], feeds, cached=False)
    assert trial.step_seconds > 0


def compile_decoder(run_cli, **sizes: int) -> SplitStateRecord:
    """Compile a decoder whose cache lies on two devices; return how it lies there."""
    Path("decoder.onnx").write_bytes(cached_decoder(**sizes).SerializeToString())
    shape = ("--shape", "seq=1,past=5", "--state", "present=past")
    bundle = compile_exactly(run_cli, "decoder.onnx", EXACT.replace("ways=2", "ways=2,weights=least"), *shape)
    (state,) = bundle.manifest.sharding.states
    return state


def test_a_cache_that_each_device_holds_whole_is_drawn_once(run_cli):
    state = compile_decoder(run_cli, heads=64, kept=1)  # heads of one column, which cannot be split
    assert (state.axis, len(state.inputs)) == (-1, 2)
    assert run_cli("verify", "out").code == 0
    assert run_cli("verify", "out", "--against", "decoder.onnx").code == 0
    first = choose_step_inputs(onnxplace.load("out"), None, {}, 0).first
    np.testing.assert_array_equal(*(first[part] for part in state.inputs))


def test_a_trial_gives_each_device_the_same_copy_of_a_state(run_cli, monkeypatch):
    state, fed = compile_decoder(run_cli, heads=64, kept=1), []
    bundle = onnxplace.load("out")
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
    assert not np.array_equal(*(feeds[part] for part in state.inputs))
    run = EngineSession.run
    monkeypatch.setattr(EngineSession, "run", lambda self, feeds, *rest: fed.append(feeds) or run(self, feeds, *rest))
    run_trials([bundle], feeds, cached=False)
    np.testing.assert_array_equal(*(fed[0][part] for part in state.inputs))


@pytest.mark.parametrize("sizes", [{}, {"heads": 64, "kept": 1}], ids=["parts", "copies"])
@pytest.mark.parametrize("command", [("run",), ("verify",), ("bench", "--repeat", "1", "--no-memory")])
def test_commands_take_states_by_their_names_in_the_model(run_cli, command, sizes):
    compile_decoder(run_cli, **sizes)
    size = 64 // sizes.get("heads", 4)
    past = np.ones((1, sizes.get("kept", 4), 3, size), np.float32)
    np.savez("inputs.npz", x=np.ones((1, 2, 64), np.float32), past=past)
    result = run_cli(command[0], "out", "--inputs", "inputs.npz", *command[1:])
    assert result.code == 0, result.err


def test_a_state_that_does_not_fit_its_parts_is_refused(run_cli):
    Path("decoder.onnx").write_bytes(cached_decoder().SerializeToString())
    shape = ("--shape", "seq=1,past=5", "--state", "present=past")
    bundle = compile_exactly(run_cli, "decoder.onnx", EXACT.replace("ways=2", "ways=2,weights=least"), *shape)
    x, past = np.zeros((1, 1, 64), np.float32), np.zeros((1, 3, 0, 16), np.float32)
    with onnxplace.InferenceSession(bundle) as session, pytest.raises(onnxplace.OnnxplaceError, match="axis 1"):
        session.run(None, {"x": x, "past": past})


def test_stages_of_split_operators_take_a_group_of_devices_each(run_cli, chain):
    devices = ("--devices", "cpu:0,cpu:1,cpu:2,cpu:3")
    bundle = compile_exactly(run_cli, chain, EXACT.replace("ways=2", "ways=2,stages=2"), *devices)
    assert bundle.manifest.sharding is not None
    assert (bundle.manifest.sharding.ways, bundle.manifest.sharding.stages) == (2, 2)
    assert all(device.nodes for device in bundle.manifest.devices)
    assert run_cli("verify", "out", "--against", chain).code == 0


def test_linked_weights_are_referred_to_in_parts_and_the_others_named(run_cli, chain):
    model = onnx.load(chain)
    onnx.save(model, "linked.onnx", save_as_external_data=True, location="linked.data", size_threshold=0)
    pipeline = EXACT.replace("exact=true", "exact=true,weights=least")
    result = run_cli("compile", "linked.onnx", "--pipeline", pipeline, "--link-weights", "-o", "out")
    assert result.code == 0
    assert "note[N011]" in result.err
    assert onnxplace.load("out").manifest.linked
    assert run_cli("verify", "out").code == 0
    assert run_cli("verify", "out", "--against", "linked.onnx").code == 0


def test_layouts_are_written_in_words_of_onnx_on_request(run_cli, chain):
    shard = r'shard{ways=2,exact=true,metadata=true,map="{\"layer.*up\": \"columns\", \"layer.*down\": \"sum\"}"}'
    bundle = compile_exactly(run_cli, chain, EXACT.replace("shard{ways=2,exact=true}", shard))
    whole = onnx.load(bundle.file("segments/whole.onnx"), load_external_data=False)
    (configuration,) = whole.configuration
    assert list(configuration.device) == ["cpu:0", "cpu:1"]
    up = next(node for node in whole.graph.node if node.name == "layer0_up")
    specs = {spec.tensor_name: spec for spec in up.device_configurations[0].sharding_spec}
    (dimension,) = specs["w0"].sharded_dim
    assert dimension.axis == 1
    assert [(part.dim_value, part.num_shards) for part in dimension.simple_sharding] == [(1024, 2)]
    assert not specs["x"].sharded_dim
    assert run_cli("verify", "out").code == 0


def test_plan_lists_the_strategies_and_writes_nothing(run_cli, chain):
    before = sorted(Path().iterdir())
    result = run_cli("plan", chain, "--estimate", "--devices", "cpu:0,cpu:1")
    assert result.code == 0
    for words in ("one device", "whole operators placed", "sharded 2 ways", "stages", "2 copies of the model"):
        assert words in result.out
    assert sorted(Path().iterdir()) == before


def test_plan_has_no_copies_of_a_model_with_states_as_compile_makes_none(run_cli, tmp_path):
    onnx.save(sums(), tmp_path / "sums.onnx")
    options = ["--estimate", "--devices", "cpu:0,cpu:1", "--shape", "n=2,m=2"]
    names = []
    for states in ([], [text for state in STATES for text in ("--state", state)]):
        data = only_json(run_cli("plan", tmp_path / "sums.onnx", *options, *states, "--json"))
        names.append([item["name"] for item in data["strategies"]])
    assert "2 copies of the model" in names[0]
    assert names[1] == [name for name in names[0] if "cop" not in name]


def test_plan_for_a_machine_that_is_not_here(run_cli, chain):
    device = 'id = "cuda:{}"\nmemory_bytes = 8000000000\nmodel = "GPU"\noperations_per_second = 1e14'
    tables = [f"[[devices]]\n{device.format(index)}\n" for index in range(4)]
    Path("cluster.toml").write_text("\n".join(tables))
    data = only_json(run_cli("plan", chain, "--target", "cluster.toml", "--json"))
    names = [item["name"] for item in data["strategies"]]
    assert "2 stages, each sharded 2 ways" in names
    assert data["is_measured"] is False
    alone = next(item for item in data["strategies"] if item["name"] == "one device")
    assert alone["step_seconds"] > 0
    assert alone["pipeline"].startswith("optimize,profile,")


def test_a_planned_pipeline_compiles(run_cli, chain):
    data = only_json(run_cli("plan", chain, "--estimate", "--devices", "cpu:0,cpu:1", "--json"))
    sharded = next(item for item in data["strategies"] if item["name"] == "sharded 2 ways")
    compile_exactly(run_cli, chain, sharded["pipeline"])
    assert run_cli("verify", "out").code == 0


def test_plan_says_what_does_not_fit(run_cli, chain):
    result = run_cli("plan", chain, "--estimate", "--devices", "cpu:0,cpu:1", "--max-memory", "1MiB")
    assert result.code == 3
    assert "one device: " in result.out
    assert "lacks" in result.out or "lack" in result.out


@pytest.mark.parametrize(("kept", "ways", "copies"), [(4, 2, 1), (2, 4, 2)])
def test_an_exported_cache_decodes_the_same_at_any_batch_and_length(run_cli, kept, ways, copies):
    model = exported_decoder(4, kept)
    Path("decoder.onnx").write_bytes(model.SerializeToString())
    devices = ",".join(f"cpu:{index}" for index in range(ways))
    shape = ("--shape", "batch=1,seq=1,past=5", "--devices", devices, "--state", "present=past")
    by_heads = json.dumps({"grow": "axis 1", "mix": "axis 1"})
    Path("map.json").write_text(by_heads)
    pipeline = EXACT.replace("exact=true", "exact=true,map=map.json").replace("ways=2", f"ways={ways}")
    bundle = compile_exactly(run_cli, "decoder.onnx", pipeline, *shape)
    assert bundle.manifest.sharding is not None
    (state,) = bundle.manifest.sharding.states
    assert (state.axis, state.copies, sum(state.sizes)) == (1, copies, kept * copies)
    session = import_onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    past = random.standard_normal((2, kept, 3, 8)).astype(np.float32)
    with onnxplace.InferenceSession(bundle) as parts:
        for step in range(3):
            x = random.standard_normal((2, 1 + step, 32)).astype(np.float32)
            expected, expected_past = session.run(None, {"x": x, "past": past})
            actual, present = parts.run(["y", "present"], {"x": x, "past": past} if step == 0 else {"x": x})
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(present, expected_past, rtol=1e-4, atol=1e-5)
            past = expected_past
    assert run_cli("verify", "out", "--steps", "3").code == 0
    assert run_cli("verify", "out", "--against", "decoder.onnx").code == 0
