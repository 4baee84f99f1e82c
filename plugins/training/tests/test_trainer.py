"""The trainer: steps equal those of one plain session, and nothing is lost or half-updated."""

import json
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.errors import ExecutionError, FeedError, InputError, OnnxplaceError, UsageError
from onnxplace_training import Trainer, make_schedule, map_arrays, write_arrays
from onnxplace_training.checkpoints import Checkpoint, StateSpec, read_checkpoint, write_checkpoint
from onnxplace_training.trainer import has_room_for_copies
from tests.support.training_models import (
    OPTIMIZERS,
    ReferenceTrainer,
    draw_batch,
    make_mlp,
    make_recurrent,
    make_transformer,
    make_two_tower,
)

MODELS = {"mlp": make_mlp, "recurrent": make_recurrent, "transformer": make_transformer, "two_tower": make_two_tower}
PLACERS = ("auto", "m-etf", "m-sct", "m-topo", "multilevel", "exact", "stages", "fit", "single")


def compile_model(model: onnx.ModelProto, path: Path, count: int = 2, **more: object) -> onnxplace.Bundle:
    devices = ",".join(f"cpu:{index}" for index in range(count))
    pipeline = "optimize,profile{estimate=true},coplace{join=never},m-topo,split,emit"
    options = {"devices": devices, "trial": False, "pipeline": pipeline, **more}
    return onnxplace.compile(model, path, **options)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return make_mlp("adamw")


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory) -> onnxplace.Bundle:
    return compile_model(model, tmp_path_factory.mktemp("mlp") / "step.bundle")


@pytest.fixture
def trainer(bundle):
    with Trainer(bundle) as opened:
        yield opened


def batches(model: onnx.ModelProto, count: int) -> list[dict]:
    return [draw_batch(model, number) for number in range(count)]


def losses(trainer: Trainer, data: list[dict]) -> list[float]:
    return [trainer.step(feeds).loss for feeds in data]


# ------------------------------------------------------------------------------------------------------------ equal


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(4)
def test_losses_and_states_equal_those_of_one_session(name, optimizer, tmp_path):
    model = MODELS[name](optimizer)
    reference = ReferenceTrainer(model)
    with Trainer(compile_model(model, tmp_path / "step.bundle", 3)) as trainer:
        if (name, optimizer) == ("transformer", "adamw"):
            assert len({state.device for state in trainer.bundle.manifest.states}) > 1
        for number, feeds in enumerate(batches(model, 20)):
            result = trainer.step(feeds)
            assert result.loss == pytest.approx(reference.step(feeds), rel=1e-5)
            assert result.step == number + 1
        states = trainer.state_dict()
    assert states.pop("trainer.step") == 20
    assert states.pop("trainer.seed") == 0
    assert set(states) == set(reference.states)
    for key, array in states.items():
        if not key.startswith(tuple(f"layers.{index}.k.bias" for index in range(2))):  # its gradient is rounding alone
            np.testing.assert_allclose(array, reference.states[key], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("placer", PLACERS)
@pytest.mark.sampled(4)
def test_any_placement_trains_equally(placer, model, tmp_path):
    pipeline = f"optimize,profile{{estimate=true}},coplace,fuse,{placer},split,emit"
    reference = ReferenceTrainer(model)
    with Trainer(compile_model(model, tmp_path / "step.bundle", 2, pipeline=pipeline)) as trainer:
        for feeds in batches(model, 5):
            assert trainer.step(feeds).loss == pytest.approx(reference.step(feeds), rel=1e-5)


def test_split_states_train_and_resume_equally(tmp_path):
    model = make_mlp("adamw", widths=(256, 512, 256), batch=64)
    pipeline = "optimize,profile{estimate=true},shard{ways=2,exact=true,weights=least},coplace,fuse,m-etf,split,emit"
    bundle = compile_model(model, tmp_path / "step.bundle", 2, pipeline=pipeline)
    assert any(state.axis >= 0 for state in bundle.manifest.sharding.states)
    reference, data = ReferenceTrainer(model), batches(model, 6)
    with Trainer(bundle) as trainer:
        first = losses(trainer, data[:3])
        trainer.save(tmp_path / "c.safetensors")
        rest = losses(trainer, data[3:])
        assert first + rest == pytest.approx([reference.step(feeds) for feeds in data], rel=1e-4)
        trainer.load(tmp_path / "c.safetensors")
        assert losses(trainer, data[3:]) == rest
        trainer.export(tmp_path / "model.onnx")
    whole = compile_model(model, tmp_path / "whole.bundle", 1)
    with Trainer(whole) as other:
        other.load(tmp_path / "c.safetensors")
        assert losses(other, data[3:]) == pytest.approx(rest, rel=1e-4)


def test_a_learning_rate_of_a_step_is_used(model, bundle):
    reference, data = ReferenceTrainer(model), batches(model, 4)
    with Trainer(bundle) as trainer:
        for feeds, rate in zip(data, (0.1, 0, 0.05, np.float32(0.01))):
            expected = reference.step(feeds, learning_rate=np.array(rate, np.float32))
            assert trainer.step(feeds, rate).loss == pytest.approx(expected, rel=1e-5)


def test_further_outputs_are_returned_as_metrics_or_as_they_are(tmp_path):
    model = make_mlp("sgd")
    name = "layers.0.weight.gradient"
    model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    norm = onnx.helper.make_node("ReduceL2", [name], ["norm"], keepdims=0)
    model.graph.node.append(norm)
    model.graph.output.append(onnx.helper.make_tensor_value_info("norm", onnx.TensorProto.FLOAT, []))
    record = json.loads(model.metadata_props[0].value)
    model.metadata_props[0].value = json.dumps({**record, "metrics": ["norm"]})
    with Trainer(compile_model(model, tmp_path / "step.bundle")) as trainer:
        before = trainer.state_dict()["layers.0.weight"]
        result = trainer.step(draw_batch(model), 0.5)
        assert result.metrics["norm"] == pytest.approx(float(np.linalg.norm(result.outputs[name])), rel=1e-5)
        np.testing.assert_allclose(
            before - 0.5 * result.outputs[name], trainer.state_dict()["layers.0.weight"], rtol=1e-4
        )


# ------------------------------------------------------------------------------------------------ save, load and resume


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5), fresh=st.booleans())
def test_runs_that_are_saved_and_resumed_anywhere_equal_an_uninterrupted_one(
    cuts, fresh, model, bundle, tmp_path_factory
):
    data = batches(model, sum(cuts))
    with Trainer(bundle) as trainer:
        expected, states = losses(trainer, data), trainer.state_dict()
    file, found, done = tmp_path_factory.mktemp("cuts") / "c.safetensors", [], 0
    trainer = Trainer(bundle)
    for count in cuts:
        found += losses(trainer, data[done : done + count])
        trainer.save(file)
        done += count
        if fresh:
            trainer.close()
            trainer = Trainer(bundle)
        else:
            trainer.step(data[0])
        trainer.load(file)
        assert trainer.step_count == done
    assert found == expected
    for key, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, states[key])
    trainer.close()


def test_a_checkpoint_of_one_placement_continues_on_another(model, bundle, tmp_path):
    data = batches(model, 8)
    other = compile_model(model, tmp_path / "other.bundle", 3)
    with Trainer(bundle) as first, Trainer(other) as second:
        losses(first, data[:4])
        first.save(tmp_path / "c.safetensors")
        second.load(tmp_path / "c.safetensors")
        assert losses(second, data[4:]) == pytest.approx(losses(first, data[4:]), rel=1e-5)


def test_states_can_be_taken_out_and_put_back_as_arrays(model, trainer):
    data = batches(model, 4)
    losses(trainer, data[:2])
    states = trainer.state_dict()
    after = losses(trainer, data[2:])
    trainer.load_state_dict(states)
    assert trainer.step_count == 2
    for key, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, states[key])
    states["layers.0.weight"][...] = 0  # a copy was taken
    assert losses(trainer, data[2:]) == after
    trainer.load_state_dict({"layers.0.bias": np.ones(16, "f4")}, strict=False)
    assert trainer.step_count == 4
    assert trainer.state_dict()["layers.0.bias"].tolist() == [1] * 16


def test_states_that_were_loaded_are_given_as_copies(trainer, tmp_path):
    trainer.save(tmp_path / "c.safetensors")
    trainer.load(tmp_path / "c.safetensors")
    before = trainer.state_dict()
    trainer.state_dict()["layers.0.weight"][...] = 0
    for key, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize("entry", [{"trainer.step": -1}, {"trainer.step": [1, 2]}, {"trainer.seed": "x"}])
def test_a_wrong_step_or_seed_changes_nothing(entry, model, trainer):
    losses(trainer, batches(model, 1))
    states = {name: np.zeros_like(array) for name, array in trainer.state_dict().items()}
    with pytest.raises(UsageError, match=rf"U005 *.*{next(iter(entry))}"):
        trainer.load_state_dict({**states, **entry})
    assert trainer.step_count == 1
    assert trainer.state_dict()["layers.0.weight"].any()


ONE_ELEMENT = """<ir_version: 10, opset_import: ["": 20]>
step (float[4] x, float[4] w, float[1] lr, int64[1] count) => (float[1] loss, float[4] w_new, int64[1] counted)
<float two = {2.0}> {
  difference = Sub(w, x)
  loss = ReduceSumSquare(difference)
  gradient = Mul(difference, two)
  share = Cast<to=1>(count)
  rate = Div(lr, share)
  change = Mul(rate, gradient)
  w_new = Sub(w, change)
  counted = Identity(count)
}"""


def test_loss_rate_and_step_may_be_vectors_of_one_element(tmp_path):
    model = parser.parse_model(ONE_ELEMENT)
    model.graph.node[1].attribute.append(onnx.helper.make_attribute("keepdims", 1))
    bundle = compile_model(model, tmp_path / "step.bundle", 1, state=["w_new=w"])
    with Trainer(bundle) as trainer:
        assert trainer.bundle.manifest.training.step == "count"
        trainer.load_state_dict({"w": np.zeros(4, "f4")})
        results = [trainer.step({"x": np.ones(4, "f4")}, 0.25) for _ in range(2)]
    assert [result.loss for result in results] == [4.0, 1.0]
    assert [result.outputs["counted"].tolist() for result in results] == [[1], [2]]


def change_checkpoint(path: Path, **entries: str | None) -> None:
    file = map_arrays(path, "L041", "")
    arrays = {name: np.array(array) for name, array in file.arrays.items()}
    metadata = {key: value for key, value in {**file.metadata, **entries}.items() if value is not None}
    write_arrays(path, arrays, metadata)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"version": "2", "step": None}, "expected version 1 of checkpoints or older, got 2"),
        ({"seed": "-1"}, "its metadata is malformed"),
        ({"seed": str(1 << 63)}, "its metadata is malformed"),
        ({"step": "99999999999999999999"}, "its metadata is malformed"),
        ({"notes": "[]"}, "its metadata is malformed"),
        ({"format": "pt"}, "not a checkpoint of onnxplace"),
    ],
)
def test_checkpoints_that_cannot_be_continued_are_refused(entries, message, trainer, tmp_path):
    trainer.save(tmp_path / "c.safetensors")
    change_checkpoint(tmp_path / "c.safetensors", **entries)
    with pytest.raises(InputError, match=rf"L041.*{message}"):
        trainer.load(tmp_path / "c.safetensors")


def test_no_byte_of_a_checkpoint_can_change_unnoticed(tmp_path):
    file, specs = tmp_path / "c.safetensors", {"w": StateSpec("w", "tensor(float)", (None,))}
    write_checkpoint(file, Checkpoint({"w": np.arange(4, dtype="f4")}, 3, 1, {"rows": "8"}), "model")
    assert read_checkpoint(file, specs).step == 3
    whole = file.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        file.write_bytes(changed)
        with pytest.raises(InputError, match="L041"):
            read_checkpoint(file, specs)


def test_states_of_another_shape_are_refused_by_name(trainer):
    states = trainer.state_dict()
    with pytest.raises(InputError, match=r"L041.*'layers.0.bias' has the shape \[3\], expected \[16\]"):
        trainer.load_state_dict({**states, "layers.0.bias": np.ones(3, "f4")})
    with pytest.raises(InputError, match=r"L041.*'layers.0.bias' has the type float64, expected float32"):
        trainer.load_state_dict({**states, "layers.0.bias": np.ones(16)})
    with pytest.raises(InputError, match=r"L041.*it has 'extra', which this model does not have"):
        trainer.load_state_dict({**states, "extra": np.ones(16)})
    states.pop("layers.0.bias")
    with pytest.raises(InputError, match=r"L041.*it has no 'layers.0.bias'"):
        trainer.load_state_dict(states)
    assert trainer.step_count == 0


# ------------------------------------------------------------------------------------------------------ what goes wrong


def spoil(feeds: dict) -> dict:
    return {**feeds, "x": np.full_like(feeds["x"], np.nan)}


def test_a_nan_loss_stops_before_it_changes_anything(model, trainer):
    data = batches(model, 4)
    losses(trainer, data[:2])
    before = trainer.state_dict()
    with pytest.raises(ExecutionError, match=r"L045.*the loss is NaN in step 3; the states are those after step 2"):
        trainer.step(spoil(data[2]))
    assert trainer.step_count == 2
    for key, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[key])
    assert np.isfinite(trainer.step(data[3]).loss)


def test_a_nan_loss_without_protection_asks_for_a_checkpoint(model, bundle, tmp_path):
    data = batches(model, 4)
    with Trainer(bundle, protect=False) as trainer:
        losses(trainer, data[:2])
        trainer.save(tmp_path / "c.safetensors")
        expected = losses(trainer, data[2:3])
        with pytest.raises(ExecutionError, match=r"L045.*NaN in step 4, which has changed the states: load the last"):
            trainer.step(spoil(data[2]))
        for act in (trainer.state_dict, lambda: trainer.save(tmp_path / "d"), lambda: trainer.step(data[0])):
            with pytest.raises(ExecutionError, match=r"L047.*the loss was NaN in step 4: load a checkpoint"):
                act()
        assert not (tmp_path / "d").exists()
        trainer.load(tmp_path / "c.safetensors")
        with pytest.raises(ExecutionError, match=r"L045.*NaN in step 3; the states are those after step 2"):
            trainer.step(spoil(data[2]))
        assert losses(trainer, data[2:3]) == expected, "loaded states are still there"


def test_training_can_go_on_after_a_nan_loss(model, bundle):
    with Trainer(bundle, on_nan="continue") as trainer:
        assert np.isnan(trainer.step(spoil(draw_batch(model))).loss)
        assert trainer.step_count == 1


def make_picking_model() -> onnx.ModelProto:
    """Return a step that fails where an index is out of range."""
    model = make_mlp("adamw")
    table = onnx.numpy_helper.from_array(np.zeros((2, 1), "f4"), "table")
    model.graph.initializer.append(table)
    model.graph.input.append(onnx.helper.make_tensor_value_info("index", onnx.TensorProto.INT64, [1]))
    model.graph.node.append(onnx.helper.make_node("Gather", ["table", "index"], ["picked"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("picked", onnx.TensorProto.FLOAT, [1, 1]))
    return model


@pytest.mark.parametrize("protect", [True, False])
def test_a_failed_step_leaves_the_states_or_says_that_they_are_lost(protect, tmp_path):
    model = make_picking_model()
    good, bad = np.zeros(1, "i8"), np.array([7])
    data = [{key: value for key, value in draw_batch(model, n).items() if key != "index"} for n in range(4)]
    with Trainer(compile_model(model, tmp_path / "step.bundle"), protect=protect) as trainer:
        losses(trainer, [{**feeds, "index": good} for feeds in data[:2]])
        trainer.save(tmp_path / "c.safetensors")
        before = trainer.state_dict()
        with pytest.raises(ExecutionError, match="X001") as caught:
            trainer.step({**data[2], "index": bad})
        if protect:
            assert "the states are those after step 2" in caught.value.hint
            for key, array in trainer.state_dict().items():
                np.testing.assert_array_equal(array, before[key])
        else:
            assert "load the last checkpoint" in caught.value.hint
            with pytest.raises(ExecutionError, match=r"L047.*step 3 failed: load a checkpoint"):
                trainer.step({**data[2], "index": good})
            trainer.load(tmp_path / "c.safetensors")
        assert trainer.step({**data[2], "index": good}).step == 3


def test_an_interrupted_step_is_completed(model, bundle, monkeypatch):
    data = batches(model, 4)
    with Trainer(bundle) as trainer:
        expected = losses(trainer, data)
    with Trainer(bundle) as trainer:
        losses(trainer, data[:1])
        submit = trainer._session.submit

        def interrupted(feeds):
            submit(feeds)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(trainer._session, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(data[1])
        assert trainer.step_count == 2
        assert losses(trainer, data[2:]) == expected[2:]


def test_a_step_that_takes_too_long_is_abandoned(model, bundle):
    with Trainer(bundle) as trainer:
        expected = trainer.step(draw_batch(model)).loss
        trainer.load_state_dict({**Trainer(bundle).state_dict()})
        with pytest.raises(onnxplace.RunTimeoutError, match="X007"):
            trainer.step(draw_batch(model), timeout=1e-6)
        assert trainer.step_count == 0
        assert trainer.step(draw_batch(model), timeout=60).loss == expected


@pytest.mark.parametrize(
    ("change", "rate", "kind", "message"),
    [
        ({"x": None}, None, FeedError, "F002.*no value for 'x'"),
        ({"y": np.ones(1)}, None, FeedError, "F001.*no input 'y'"),
        ({"x": np.ones((1, 1), "f4")}, None, FeedError, "F003"),
        ({"step": np.array(3)}, None, FeedError, "F001.*the trainer feeds 'step' by itself"),
        ({"learning_rate": np.float32(1)}, None, FeedError, "F001.*the trainer feeds 'learning_rate'"),
        ({"layers.0.bias": np.ones(16, "f4")}, None, FeedError, "F001.*'layers.0.bias' is a state"),
        ({}, -1, UsageError, "U005.*expected a learning rate of 0 or more, got -1"),
        ({}, float("nan"), UsageError, "U005.*got nan"),
        ({}, "0.1", UsageError, "U005.*got '0.1'"),
        ({}, [1, 2], UsageError, "U005"),
    ],
)
def test_bad_feeds_and_rates_change_nothing(change, rate, kind, message, model, trainer):
    feeds = {key: value for key, value in {**draw_batch(model), **change}.items() if value is not None}
    with pytest.raises(kind, match=message):
        trainer.step(feeds, rate)
    assert trainer.step_count == 0
    assert trainer.step(draw_batch(model)).step == 1


def test_feeds_that_are_no_mapping_are_refused(trainer):
    with pytest.raises(FeedError, match=r"U054.*expected a mapping"):
        trainer.step([1])


def test_a_bundle_of_another_model_is_refused(compiled):
    with pytest.raises(UsageError, match=r"L040.*not one of a training step"):
        Trainer(compiled)


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 1.5}, {"seed": True}, {"on_nan": "ignore"}])
def test_bad_options_are_refused(bundle, options):
    with pytest.raises(UsageError, match=r"U005"):
        Trainer(bundle, **options)


def test_a_runtime_without_states_is_refused(bundle):
    with pytest.raises(UsageError, match="U045"):
        Trainer(bundle, runtime="simulated")


def test_a_session_whose_states_cannot_be_protected_is_closed(bundle, monkeypatch):
    def refuse(session):
        raise UsageError("U045", "no room")

    before = set(threading.enumerate())
    monkeypatch.setattr(onnxplace.InferenceSession, "protect_states", refuse)
    with pytest.raises(UsageError, match="U045"):
        Trainer(bundle, protect=True)
    assert not {thread for thread in threading.enumerate() if thread.name != "onnxplace reaper"} - before


def test_states_are_protected_where_devices_have_room_for_them(bundle):
    manifest = bundle.manifest
    assert has_room_for_copies(manifest)
    tight = tuple(item.model_copy(update={"limit_bytes": item.peak_bytes + 8}) for item in manifest.devices)
    assert not has_room_for_copies(manifest.model_copy(update={"devices": tight}))


# ------------------------------------------------------------------------------------------------------------- loaders


def test_a_loader_is_drawn_in_a_thread_while_steps_run(model, trainer):
    threads = set()

    def load():
        for feeds in batches(model, 5):
            threads.add(threading.current_thread().name)
            yield feeds

    assert [result.step for result in trainer.train(load())] == [1, 2, 3, 4, 5]
    assert threads == {"onnxplace batches"}
    threads.clear()
    assert len(list(trainer.train(load(), prefetch=0))) == 5
    assert threads == {threading.current_thread().name}


def test_prefetching_stays_within_its_depth(model, trainer):
    drawn = []

    def load():
        for number, feeds in enumerate(batches(model, 10)):
            drawn.append(number)
            yield feeds

    run = trainer.train(load(), prefetch=2)
    for taken in range(1, 5):
        next(run)
        assert len(drawn) <= taken + 2
    run.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "onnxplace batches"]


def test_a_list_is_repeated_until_the_last_step(model, bundle):
    data = batches(model, 3)
    with Trainer(bundle) as trainer:
        expected = losses(trainer, [*data, *data, *data[:1]])
    with Trainer(bundle) as trainer:
        assert [result.loss for result in trainer.train(data, 7)] == expected
        assert len(list(trainer.train(iter(data), 7))) == 3, "an iterator has one pass"
        assert not list(trainer.train(data, 0))


def test_a_schedule_gives_the_rate_of_each_step(model, bundle):
    schedule = make_schedule("cosine", 0.1, 6, warmup=2)
    with Trainer(bundle) as trainer:
        rates = [result.learning_rate for result in trainer.train(batches(model, 6), learning_rate=schedule)]
    assert rates == [0.05, 0.1, 0.1, *(pytest.approx(0.05 * (1 + np.cos(np.pi * part))) for part in (0.25, 0.5, 0.75))]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_a_loader_are_raised_in_their_turn(model, trainer, prefetch):
    def load():
        yield from batches(model, 2)
        raise OSError("the disk is gone")

    steps = []
    with pytest.raises(OSError, match="the disk is gone"):
        steps.extend(result.step for result in trainer.train(load(), prefetch=prefetch))
    assert trainer.step_count == 2
    for loader, message in (([], "U054.*no batches"), (5, "U054.*expected an iterable"), ({"x": 1}, "U054")):
        with pytest.raises(FeedError, match=message):
            list(trainer.train(loader, 1, prefetch=prefetch))
    with pytest.raises(UsageError, match=r"U005.*number of steps"):
        list(trainer.train([], -1))
    for wrong in (-1, 1.5):  # a negative number of batches would wait forever
        with pytest.raises(UsageError, match=r"U005.*batches to prefetch"):
            list(trainer.train([], 1, prefetch=wrong))
    assert not list(trainer.train([], np.int64(0)))


def test_a_loader_is_opened_once_per_pass(model, trainer):
    """`iter` of a DataLoader starts processes."""

    class Loader:
        opened = 0

        def __iter__(self):
            Loader.opened += 1
            return iter(batches(model, 2))

    assert len(list(trainer.train(Loader(), 4, prefetch=0))) == 4
    assert Loader.opened == 2


# ------------------------------------------------------------------------------------------------------------ inference


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_computes_the_forward_part_with_new_parameters(name, tmp_path):
    model = MODELS[name]("momentum")
    bundle = compile_model(model, tmp_path / "step.bundle")
    value = bundle.manifest.training.inference.outputs[0]
    with Trainer(bundle) as trainer:
        losses(trainer, batches(model, 3))
        trainer.export(tmp_path / "model.onnx")
        states = trainer.state_dict()
    exported = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(exported, full_check=True)
    feeds = draw_batch(model, 9)
    names = {item.name for item in exported.graph.input}
    assert names == set(bundle.manifest.training.inference.inputs)
    # The forward part of the whole step, with the same parameters.
    model.graph.output.append(onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None))
    plain = onnx.reference.ReferenceEvaluator(model)
    known = {item.name for item in model.graph.input}
    own = {key: array for key, array in states.items() if key in known}
    expected = plain.run([value], {**feeds, **own, "learning_rate": np.float32(0)})[0]
    (result,) = onnx.reference.ReferenceEvaluator(exported).run(None, {key: feeds[key] for key in names})
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def edit_record(bundle: onnxplace.Bundle, **changes: object) -> onnxplace.Bundle:
    record = bundle.manifest.training.model_copy(update=changes)
    return onnxplace.Bundle(bundle.path, bundle.manifest.model_copy(update={"training": record}))


def test_a_step_without_an_inference_part_is_not_exported(bundle, tmp_path):
    part = bundle.manifest.training.inference
    cases = {
        "does not say which values": {"inference": part.model_copy(update={"outputs": ()})},
        "no longer has 'nothing'": {"inference": part.model_copy(update={"outputs": ("nothing",)})},
        "reads 'x', so it is not that of inference": {"seed": "x"},
    }
    for message, changes in cases.items():
        with Trainer(bundle) as trainer:
            trainer._training = edit_record(bundle, **changes).manifest.training
            with pytest.raises(UsageError, match=f"L040.*{message}"):
                trainer.export(tmp_path / "model.onnx")
        assert not (tmp_path / "model.onnx").exists()


def test_a_trainer_is_neither_copied_nor_used_after_its_end(model, bundle):
    trainer = Trainer(bundle)
    with pytest.raises(UsageError, match="a Trainer cannot be copied"):
        trainer.__reduce__()
    trainer.close()
    trainer.close()
    with pytest.raises(OnnxplaceError, match="closed"):
        trainer.step(draw_batch(model))
