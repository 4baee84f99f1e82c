"""Initial values of states: stored once in the bundle, used by the first run, and never loaded by a segment."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxplace
from onnxplace.bundle.bundle import MANIFEST_FILE
from onnxplace.errors import ExecutionError, FeedError, UsageError
from onnxplace.runtime.interface import RuntimeSession
from tests.support.state_checks import ON_ONE, STATES, feeds, sums
from tests.support.training_models import ReferenceTrainer, draw_batch, make_mlp

SHARDED = "optimize,profile{estimate=true},shard{ways=2,exact=true,weights=least},coplace,fuse,m-etf,split,emit"


def place_apart(folder: Path) -> str:
    file = folder / "map.json"
    file.write_text(json.dumps({"(?!.*layers.[12]).*layers.0.*": "cpu:1", ".*": "cpu:0"}))
    return (
        f"optimize,profile{{estimate=true}},coplace{{join=never,device_map={json.dumps(str(file))}}},m-etf,split,emit"
    )


def compile_step(model: onnx.ModelProto, folder: Path, pipeline: str = "", **more: object) -> onnxplace.Bundle:
    states = [f"{item.name}={item.name.removesuffix('.new')}" for item in model.graph.output if ".new" in item.name]
    options = {"devices": "cpu:0,cpu:1", "trial": False, "pipeline": pipeline or place_apart(folder), **more}
    return onnxplace.compile(model, folder / "step.bundle", state=states, **options)


def read_initializers(bundle: onnxplace.Bundle) -> set[str]:
    graphs = [onnx.load(bundle.file(item.file), load_external_data=False).graph for item in bundle.manifest.segments]
    return {tensor.name for graph in graphs for tensor in graph.initializer}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return make_mlp("adamw")


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory) -> onnxplace.Bundle:
    return compile_step(model, tmp_path_factory.mktemp("step"))


def run_steps(session: onnxplace.InferenceSession, model: onnx.ModelProto, count: int) -> list[float]:
    batches = [{**draw_batch(model, number), "step": np.array(number + 1)} for number in range(count)]
    return [float(session.run(["loss"], batch)[0]) for batch in batches]


def reference_losses(model: onnx.ModelProto, count: int) -> list[float]:
    reference = ReferenceTrainer(model)
    return [reference.step(draw_batch(model, number)) for number in range(count)]


def test_a_first_run_starts_from_the_values_of_the_model(bundle, model):
    assert {state.device for state in bundle.manifest.states} == {"cpu:0", "cpu:1"}
    with onnxplace.InferenceSession(bundle) as session:
        np.testing.assert_allclose(run_steps(session, model, 5), reference_losses(model, 5), rtol=1e-6)
        session.reset_state()
        np.testing.assert_allclose(run_steps(session, model, 2), reference_losses(model, 2), rtol=1e-6)


def test_each_conversation_starts_from_them(bundle, model):
    with onnxplace.InferenceSession(bundle) as session, session.conversation() as other:
        expected = run_steps(session, model, 3)
        assert run_steps(other, model, 3) == expected


def test_no_segment_holds_them_and_the_bundle_holds_them_once(bundle, model):
    states = {state.input for state in bundle.manifest.states}
    assert states == {tensor.name for tensor in model.graph.initializer if tensor.name.startswith("layers")}
    assert not states & read_initializers(bundle)
    assert all(state.initial is not None for state in bundle.manifest.states)
    placed = {(state.initial.offset, state.initial.bytes) for state in bundle.manifest.states}
    assert len(placed) < len(states), "moments are zeros of equal sizes, which are stored once"


def test_they_are_mapped_and_equal_those_of_the_model(bundle, model):
    initial = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    arrays = bundle.initial_states()
    assert set(arrays) == {state.input for state in bundle.manifest.states}
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, initial[name])
        assert not array.flags.writeable
        assert not array.flags.owndata


def test_split_states_start_from_their_parts(tmp_path):
    model = make_mlp("adamw", widths=(256, 512, 256), batch=64)
    bundle = compile_step(model, tmp_path, SHARDED)
    states = bundle.manifest.sharding.states
    assert any(state.axis >= 0 for state in states)
    whole = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    with onnxplace.InferenceSession(bundle) as session:
        for name, array in session.read_states().items():
            np.testing.assert_array_equal(array, whole[name])
        losses = run_steps(session, model, 4)
        np.testing.assert_allclose(losses, reference_losses(model, 4), rtol=1e-5)
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(whole[name]) for name in session.read_states()}
        first_batch = {**draw_batch(model, 0), "step": np.array(1)}
        assert float(session.run(["loss"], {**first_batch, **values})[0]) == losses[0]
        with pytest.raises(FeedError):
            session.run(["loss"], [first_batch])


def test_the_commands_start_from_them(bundle, run_cli):
    for command in (("verify",), ("run", "--repeat", "3"), ("bench", "--repeat", "1", "--no-memory")):
        result = run_cli(command[0], bundle.path, *command[1:])
        assert result.code == 0, result


def test_linked_weights_are_not_copied(model, tmp_path):
    copied = onnx.ModelProto()
    copied.CopyFrom(model)  # saving makes the weights of its argument external
    onnx.save(copied, tmp_path / "step.onnx", save_as_external_data=True, location="step.bin", size_threshold=256)
    states = [f"{item.name}={item.name.removesuffix('.new')}" for item in model.graph.output if ".new" in item.name]
    bundle = onnxplace.compile(
        tmp_path / "step.onnx",
        tmp_path / "out",
        devices="cpu:0",
        state=states,
        link_weights=True,
        pipeline="optimize,profile{estimate=true},coplace,single,split,emit",
    )
    assert {(state.initial.file, state.initial.linked) for state in bundle.manifest.states} == {
        ("step.bin", True),
        ("segments/weights.bin", False),
    }
    with onnxplace.InferenceSession(onnxplace.load(tmp_path / "out", "all")) as session:
        np.testing.assert_allclose(run_steps(session, model, 3), reference_losses(model, 3), rtol=1e-6)


@pytest.mark.parametrize("link", [False, True])
def test_small_values_and_scalars_and_empty_ones_are_stored_too(tmp_path, link):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1] x, float count, bfloat16[2] half, float[n] none, string[1] word)
        => (float[1] y, float count_new, bfloat16[2] half_new, float[m] none_new, string[1] word_new) {
        one = Constant<value_float = 1.0>()
        count_new = Add(count, one)
        half_new = Identity(half)
        none_new = Concat<axis = 0>(none, x)
        word_new = Identity(word)
        y = Add(x, count)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(5, "f4"), "count"),
            helper.make_tensor("half", TensorProto.BFLOAT16, [2], [1.5, -2.0]),
            numpy_helper.from_array(np.zeros(0, "f4"), "none"),
            helper.make_tensor("word", TensorProto.STRING, [1], ["a"]),
        ]
    )
    onnx.save(model, tmp_path / "m.onnx")
    options = {"target": ON_ONE, "state": ["*_new=*"], "shape": {"n": 1}, "link_weights": link}
    options["pipeline"] = "optimize,profile{estimate=true},coplace,single,split,emit"
    bundle = onnxplace.compile(tmp_path / "m.onnx", tmp_path / "out", **options)
    assert {name: array.tolist() for name, array in bundle.initial_states().items()} == {
        "count": 5,
        "half": [1.5, -2.0],
        "none": [],
    }
    assert read_initializers(bundle) & {"count", "half", "none", "word"} == {"word"}
    with onnxplace.InferenceSession(bundle) as session:
        for expected in (6, 7):
            assert session.run(None, {"x": np.ones(1, "f4")})[0].tolist() == [expected]
        states = session.read_states()
        assert states["count"] == 7
        assert states["none"].tolist() == [1, 1]
        assert states["half"].astype("f4").tolist() == [1.5, -2.0]
        assert states["word"].tolist() == ["a"]


# ------------------------------------------------------------------------------------------------------ read and kept


def test_states_are_read_without_a_run(bundle, model):
    reference = ReferenceTrainer(model)
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        for name, array in session.read_states().items():
            np.testing.assert_array_equal(array, reference.states[name])
        run_steps(session, model, 2)
        for number in range(2):
            reference.step(draw_batch(model, number))
        states = session.read_states()
        assert len(session.list_timelines()) == 2
        assert set(states) == set(reference.states)
        for name, array in states.items():
            np.testing.assert_allclose(array, reference.states[name], rtol=1e-4, atol=1e-7)
            array[...] = np.nan
        assert np.isfinite(run_steps(session, model, 1)).all(), "they are copies"


def test_reading_states_waits_for_the_runs_in_flight(bundle, model):
    with onnxplace.InferenceSession(bundle) as session:
        batches = [{**draw_batch(model, number), "step": np.array(number + 1)} for number in range(6)]
        futures = [session.submit(batch) for batch in batches]
        states = session.read_states()
        assert all(future.done() for future in futures)
        last = session.run(["layers.0.weight.new"], {**batches[0], "learning_rate": np.float32(0), "step": np.array(7)})
        np.testing.assert_allclose(last[0], states["layers.0.weight"], rtol=1e-6)
    with pytest.raises(ExecutionError, match="closed"):
        session.read_states()


def compile_sums(folder: Path) -> onnxplace.Bundle:
    """Compile sums whose runs fail if `pick` is too large, with initial values."""
    model = sums()
    model.graph.initializer.append(numpy_helper.from_array(np.array([10, 20], "f4"), "total"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(0, "f4"), "log"))
    return onnxplace.compile(
        model, folder / "sums.bundle", target=ON_ONE, shape={"n": 2, "m": 1}, state=STATES, trial=False
    )


BAD = {"x": np.ones(2, "f4"), "pick": np.array([9], "i8")}


def test_a_failed_run_does_not_start_anew_from_initial_values(tmp_path):
    with onnxplace.InferenceSession(compile_sums(tmp_path)) as session:
        session.run(None, feeds(1))
        with pytest.raises(ExecutionError):
            session.run(None, BAD)
        with pytest.raises(FeedError, match="failed and lost it") as caught:
            session.run(None, feeds(1))
        assert "reset_state" in caught.value.hint
        with pytest.raises(FeedError, match="the states are lost"):
            session.read_states()
        session.reset_state()
        assert session.run(["total_next"], feeds(1))[0].tolist() == [11, 22]


def test_protected_states_are_back_after_a_failure(tmp_path):
    with onnxplace.InferenceSession(compile_sums(tmp_path)) as session:
        session.protect_states()
        with pytest.raises(ExecutionError):
            session.run(None, BAD)
        assert session.run(["total_next"], feeds(1))[0].tolist() == [11, 22]
        with pytest.raises(ExecutionError):
            session.run(None, {**BAD, "total": np.zeros(2, "f4")})
        assert session.read_states()["total"].tolist() == [11, 22]
        assert session.run(["total_next"], feeds(1))[0].tolist() == [12, 24]
        session.reset_state()
        assert session.read_states()["total"].tolist() == [10, 20]


def test_protected_states_can_be_restored_after_a_run(tmp_path):
    with onnxplace.InferenceSession(compile_sums(tmp_path)) as session, session.conversation() as other:
        for opened in (session, other):
            opened.protect_states()
            totals = [opened.run(["total_next"], feeds(1))[0].tolist() for _ in range(2)]
            assert totals == [[11, 22], [12, 24]]
            assert opened.count_state_changes() == 2
            opened.restore_states()
            assert opened.count_state_changes() == 1
            assert opened.read_states()["total"].tolist() == [11, 22]
            assert opened.run(["total_next"], feeds(1))[0].tolist() == [12, 24]


def test_a_runtime_that_cannot_read_states_says_so():
    class Plain(RuntimeSession):
        def submit(self, feeds, states=()): ...
        def close(self, timeout=None): ...

    session = Plain()
    states = session.states
    methods = states.read, states.protect, states.restore, states.count_changes
    for act in methods:
        with pytest.raises(UsageError, match=r"U045.*Plain (cannot|does not)"):
            act()


# ------------------------------------------------------------------------------------------------------ hostile bundles


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"file": "../secret.bin"}, "N002", "which is not a file of the bundle"),
        ({"file": "costs.json", "linked": True}, "N002", "which is not a file of the bundle"),
        ({"offset": 1 << 40}, "N002", "ends at byte"),
        ({"bytes": 12}, "N002", "has 12 bytes, expected"),
        ({"shape": [1, 1]}, "N002", "bytes, expected 4"),
        ({"offset": -4}, "N002", "malformed"),
    ],
)
def test_a_bundle_whose_initial_values_are_elsewhere_is_refused(model, tmp_path, change, code, message):
    bundle = compile_step(model, tmp_path)
    file = bundle.path / MANIFEST_FILE
    data = json.loads(file.read_text())
    data["states"][0]["initial"] |= change
    file.write_text(json.dumps(data))
    with pytest.raises(onnxplace.BundleError, match=message) as caught:
        onnxplace.load(bundle.path)
    assert caught.value.code == code


def test_a_bundle_whose_initial_values_have_another_shape_is_refused(model, tmp_path):
    bundle = compile_step(model, tmp_path)
    file = bundle.path / MANIFEST_FILE
    data = json.loads(file.read_text())
    record = data["states"][0]["initial"]
    record["shape"] = [1, *record["shape"]]
    file.write_text(json.dumps(data))
    with pytest.raises(onnxplace.BundleError, match=r"N002.*has the shape \[1,"):
        onnxplace.load(bundle.path)
