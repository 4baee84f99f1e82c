"""The zoo's driver on handmade models, and on models of torch and transformers if they are installed."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from benchmarks import zoo
from benchmarks.zoo import RANDOM, ZOO, Result, calls, check, compared, compiled, plainly, report

STEPS = 12


def chain(path, scale=0.9, state=False):
    """Write a model of `STEPS` products, each with a Tanh; its state, if it has one, sums up their results."""
    nodes = " ".join(f"m{i} = MatMul(a{i}, w) a{i + 1} = Tanh(m{i})" for i in range(STEPS))
    inputs = "float[batch, 3] x" + (", float[batch, 3] past" if state else "")
    outputs = "float[batch, 3] y" + (", float[batch, 3] present" if state else "")
    state_node = f" present = Add(a{STEPS}, past)" if state else ""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> chain ({inputs}) => ({outputs}) '
        f"{{ a0 = Identity(x) {nodes} y = Identity(a{STEPS}){state_node} }}"
    )
    weight = (np.arange(9, dtype=np.float32).reshape(3, 3) - 3) * scale / 6
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)
    return path


def feeds(batch, *names):
    random = np.random.default_rng(batch)
    return {name: random.standard_normal((batch, 3)).astype(np.float32) for name in names or ("x",)}


RUNS = [[feeds(2)], [feeds(5)]]


@pytest.mark.parametrize("placer", ["m-etf", RANDOM])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_bundle_is_compared_with_its_model_for_several_sizes(tmp_path, placer, devices):
    result = check(chain(tmp_path / "chain.onnx"), "chain", "by hand", devices, placer, RUNS, (), tmp_path / "bundle")
    assert (result.problem, result.exact, result.devices, result.placer) == ("", True, devices, placer)
    assert result.nodes > STEPS
    assert result.segments > devices if placer == RANDOM else result.segments >= 1


def test_states_are_carried_between_the_calls_of_a_run(tmp_path):
    path = chain(tmp_path / "chain.onnx", state=True)
    runs = [[feeds(2, "x", "past"), feeds(2, "x")], [feeds(4, "x", "past"), feeds(4, "x"), feeds(4, "x")]]
    result = check(path, "chain", "by hand", 2, RANDOM, runs, ("present=past",), tmp_path / "bundle")
    assert (result.problem, result.exact) == ("", True)


def test_another_model_is_distinguished(tmp_path):
    path, changed = chain(tmp_path / "chain.onnx"), chain(tmp_path / "other.onnx", scale=0.8)
    bundle = compiled(path, 2, RANDOM, RUNS[0][0], (), tmp_path / "bundle")
    assert compared(bundle, path, RUNS)["y"] < 1e-3
    assert compared(bundle, changed, RUNS)["y"] == float("inf")


def test_a_failed_compile_is_reported_with_its_error(tmp_path):
    path = chain(tmp_path / "chain.onnx")
    result = check(path, "chain", "by hand", 2, "m-etf", RUNS, ("y=nothing",), tmp_path / "bundle")
    assert result.problem.startswith("UsageError: error[S001]")


def test_a_model_with_trivial_outputs_is_no_reference(tmp_path):
    assert plainly(chain(tmp_path / "chain.onnx"), RUNS) == ""
    assert "all zeros" in plainly(chain(tmp_path / "zeros.onnx", scale=0.0), RUNS)
    assert plainly(chain(tmp_path / "nan.onnx"), [[{"x": np.full((1, 3), np.nan, np.float32)}]]) != ""
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert "broken.onnx" in plainly(tmp_path / "broken.onnx", RUNS)


def test_the_exit_code_reports_failures(capsys):
    good = Result("bert", "dynamo", 9, 2, "auto", segments=3)
    assert [report([good]), report([good, replace(good, problem="differs: y")]), report([])] == [0, 1, 2]
    assert "1 of 2 bundles" in capsys.readouterr().out


def test_the_zoo_contains_the_documented_models():
    assert {"bert", "gpt2", "llama", "t5", "vit", "clip", "whisper", "mixtral", "mobilenet"} <= {*ZOO}
    assert {"detr", "segformer"} & {*ZOO}


@pytest.mark.parametrize("name", list(ZOO))
def test_inputs_fit_the_axes_for_every_size(name):
    architecture = ZOO[name]
    for number, sizes in enumerate(architecture.sizes):
        made = architecture.feeds(number)
        assert {key: array.shape for key, array in made.items()} == {
            key: tuple(sizes.get(axis, axis) for axis in item.axes) for key, item in architecture.inputs.items()
        }
        assert all(
            np.array_equal(array, repeated)
            for array, repeated in zip(made.values(), architecture.feeds(number).values())
        )


def test_later_calls_omit_the_cache_and_see_more_tokens():
    architecture = ZOO["gpt2-cache"]
    sizes = architecture.sizes[0]
    first, second, third = calls(architecture, 0)
    assert {key for key in first if key not in second} == {key for key in first if key.startswith("past_key_values.")}
    lengths = [call["attention_mask"].shape[1] for call in (first, second, third)]
    assert lengths == [sizes["past"] + step * sizes["seq"] for step in (1, 2, 3)]


@pytest.mark.skipif(not (find_spec("torch") and find_spec("transformers")), reason="needs the extra [zoo]")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit", "gpt2-cache"])
def test_an_exported_architecture_is_compiled_and_verified(name, tmp_path, capsys):
    arguments = [name, "--exporters", "torchscript", "--placers", "random", "--devices", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["zoo.py", *arguments, "--folder", str(tmp_path)])
        assert zoo.main() == 0
    assert "1 of 1 bundles" in capsys.readouterr().out
