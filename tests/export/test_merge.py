"""`onnxplace merge`: the segments of a bundle as one model again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, note, settings, strategies as st
from onnx import numpy_helper, parser, printer

import models
import onnxplace
from onnxplace.bundle.bundle import WHOLE_MODEL_FILE
from onnxplace.driver.compile import compile_model
from onnxplace.export import merging
from onnxplace.export.merging import describe_merged, merge_bundle
from onnxplace.measure.compare import compare_output
from tests.conftest import FAST_PIPELINE
from tests.end_to_end.split_checks import ALTERNATING
from tests.end_to_end.weight_checks import chain, compiled as compile_chain, saved
from tests.export.samples import assert_same_outputs, draw_feeds, run_file
from tests.support.chains import mlp
from tests.support.commands import only_json
from tests.support.random_models import RandomModel, random_models, reference, run_plain
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, placements

SHAPES = {
    "two-tower": {"images": 2, "texts": 3},
    "transformer": {"batch": 2, "seq": 16},
    "decoder": {"batch": 2, "seq": 3, "past": 16},
}
# vgg19 and zfnet512 are larger and of the same kind as alexnet.
EXAMPLES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "alexnet")) for name in models.MODELS]
EXAMPLES = [entry for entry in EXAMPLES if entry.values[0] not in ("vgg19", "zfnet512")]


@settings(
    max_examples=int(os.environ.get("ONNXPLACE_EXAMPLES", "0")) or 80,
    deadline=None,
    derandomize="ONNXPLACE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(), placements(), st.booleans(), st.booleans())
def test_a_merged_model_computes_the_same_as_the_model_in_every_split(
    model: RandomModel, placement: RandomPlacement, optimized: bool, external: bool
) -> None:
    try:
        expected = reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    note(printer.to_text(model.proto))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = compiled_with(model.proto, placement, folder, optimized=optimized, dimensions=model.dimensions)
        merged = merge_bundle(bundle, folder / "merged.onnx", external_data=external)
        assert_same(run_plain(merged.path, model.feeds), expected)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.sampled(5)
def test_merged_examples_have_the_nodes_and_bits_of_the_uncut_model(name: str, tmp_path: Path):
    models.save(models.build(name), tmp_path / "model.onnx")
    placement, sizes = RandomPlacement((0, 0, 0, 0, 1, 1, 1)), SHAPES.get(name, {})
    bundle = compiled_with(tmp_path / "model.onnx", placement, tmp_path, fused=True, dimensions=sizes)
    assert len({segment.device for segment in bundle.manifest.segments}) == 2
    merged = merge_bundle(bundle, tmp_path / "merged.onnx")
    onnx.checker.check_model(merged.path)
    whole = onnx.load(bundle.file(WHOLE_MODEL_FILE)).graph
    graph = onnx.load(merged.path).graph
    assert sorted(n.SerializeToString() for n in graph.node) == sorted(n.SerializeToString() for n in whole.node)
    assert [v.name for v in (*graph.input, *graph.output)] == [v.name for v in (*whole.input, *whole.output)]
    weights = {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer}
    assert weights == {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in whole.initializer}
    feeds = draw_feeds(bundle)
    assert_same_outputs(run_file(merged.path, feeds), run_file(bundle.file(WHOLE_MODEL_FILE), feeds))


def test_a_merged_model_takes_and_returns_states_as_inputs_and_outputs(decoder_bundle, tmp_path):
    merged = merge_bundle(decoder_bundle, tmp_path / "merged.onnx")
    feeds = draw_feeds(decoder_bundle)
    outputs = run_file(merged.path, feeds)
    assert {"logits", "present.0.key", "present.1.value"} <= outputs.keys()
    assert_same_outputs(outputs, run_file(decoder_bundle.file(WHOLE_MODEL_FILE), feeds))
    again = compile_model(merged.path, tmp_path / "again", devices="cpu:0", shape={"batch": 1, "seq": 3, "past": 5},
                          state={"present.*": "past.*"}, trial=False).bundle  # fmt: skip
    assert len(again.manifest.states) == 4


def test_the_initial_value_of_a_state_is_a_default_of_its_input_again(sums_bundle, tmp_path):
    assert sums_bundle.manifest.states[0].initial is not None
    merged = merge_bundle(sums_bundle, tmp_path / "merged.onnx")
    x = np.ones(3, np.float32)
    assert run_file(merged.path, {"x": x})["sum"].tolist() == [2, 3, 4]
    assert run_file(merged.path, {"x": x, "total": x})["sum"].tolist() == [2, 2, 2]


OUTPUTS_OF_EVERY_KIND = """
<ir_version: 9, opset_import: ["": 18]>
g (float[2] x, float[2] w) => (float[2] x, float[2] w, float[2] c, float[2] z)
<float[2] w = {1, 2}, float[2] c = {3, 4}>
{ y = Add(x, w) z = Mul(y, c) }
"""


def test_outputs_that_are_inputs_or_weights_keep_their_names(tmp_path):
    proto = parser.parse_model(OUTPUTS_OF_EVERY_KIND)
    merged = merge_bundle(compiled_with(proto, ALTERNATING, tmp_path, optimized=False), tmp_path / "merged.onnx")
    graph = onnx.load(merged.path).graph
    assert [node.op_type for node in graph.node] == ["Add", "Mul"]
    x = np.float32([5, 6])
    for feeds in ({"x": x}, {"x": x, "w": x}):
        assert_same(run_plain(merged.path, [feeds]), run_plain(proto.SerializeToString(), [feeds]))


def test_what_the_file_said_of_its_model_is_there_again(tmp_path):
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        classifier (float[2, 4] x) => (float[2, 4] z) { y = Relu(x) z = Exp(y) }""")
    model.domain, model.model_version, model.doc_string = "org.example", 7, "Fußgänger"
    model.graph.doc_string = "two nodes"
    model.metadata_props.add(key="labels", value="a,b")
    model.metadata_props.add(key="binary").MergeFromString(b"\x12\x02\xc3\x28")  # not UTF-8
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    bundle = compile_model(
        tmp_path / "model.onnx", tmp_path / "b", devices="cpu:0,cpu:1", pipeline=FAST_PIPELINE
    ).bundle
    merged = onnx.load(merge_bundle(bundle, tmp_path / "merged.onnx").path)
    assert (merged.domain, merged.model_version, merged.doc_string) == ("org.example", 7, "Fußgänger")
    assert merged.graph.doc_string == "two nodes"
    assert {entry.key: entry.value for entry in merged.metadata_props}["labels"] == "a,b"
    assert {entry.key for entry in merged.metadata_props} == {"labels", "binary"}


@pytest.mark.parametrize("limit", [None, 1000])
def test_large_weights_go_to_a_file_of_their_own(limit, tmp_path, monkeypatch):
    """Limit 1000 stands for 1 GiB: the model then has references only, as a model of 2 GiB must."""
    bundle = compile_chain(saved(tmp_path / "here", chain(4)), tmp_path)
    if limit:
        monkeypatch.setattr(merging, "MAX_INLINE_BYTES", limit)
    merged = merge_bundle(bundle, tmp_path / "merged.onnx")
    assert (merged.data is not None) == (limit is not None)
    if limit:
        assert merged.path.stat().st_size < 4096 < merged.data.stat().st_size
    feeds = draw_feeds(bundle)
    assert_same_outputs(run_file(merged.path, feeds), run_file(bundle.file(WHOLE_MODEL_FILE), feeds))


def test_a_foreign_file_is_not_reported_as_that_of_the_weights(tmp_path):
    proto = parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Neg(x) }')
    bundle = compiled_with(proto, RandomPlacement((0,), (0,)), tmp_path, optimized=False)
    (tmp_path / "merged.onnx.data").write_bytes(b"of an earlier model")
    merged = merge_bundle(bundle, tmp_path / "merged.onnx", external_data=True, force=True)
    assert merged.data is None
    assert "weights in" not in describe_merged(merged)


def test_linked_weights_are_merged_from_the_files_of_the_model(tmp_path):
    bundle = compile_chain(saved(tmp_path / "here", chain(4)), tmp_path, link_weights=True)
    feeds = draw_feeds(bundle)
    with onnxplace.InferenceSession(bundle) as session:
        expected = session.run(None, feeds)
    for external in (False, True):
        merged = merge_bundle(bundle, tmp_path / f"{external}.onnx", external_data=external)
        assert_same(list(run_file(merged.path, feeds).values()), expected)


def test_a_sharded_bundle_is_merged_with_its_exchanges_and_says_so(tmp_path, run_cli):
    onnx.save(mlp(), tmp_path / "model.onnx")
    pipeline = "optimize,profile{estimate=true},shard{ways=2,exact=true},coplace{join=never},fuse,m-etf,split,emit"
    bundle = compile_model(
        tmp_path / "model.onnx", tmp_path / "bundle", devices="cpu:0,cpu:1", pipeline=pipeline
    ).bundle
    assert bundle.manifest.sharding is not None
    result = run_cli("merge", bundle.path, "-o", tmp_path / "merged.onnx", "--json")
    (note,) = only_json(result)["diagnostics"]
    assert (note["code"], list(note)) == ("I001", ["code", "message", "where", "hint"])
    assert "note[I001]" in result.err
    feeds = draw_feeds(bundle)
    expected = run_file(bundle.file(WHOLE_MODEL_FILE), feeds)
    actual = run_file(tmp_path / "merged.onnx", feeds)
    assert len(onnx.load(tmp_path / "merged.onnx").graph.node) > len(
        onnx.load(bundle.file(WHOLE_MODEL_FILE)).graph.node
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert compare_output(name, actual[name], value).equal


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_one_model_and_verify_agrees(run_cli, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_cli("merge", compiled, "-o", "merged.onnx")
    assert (result.code, result.out) == (0, "merged.onnx: 5 nodes of 3 segments\n"), result
    assert run_cli("verify", compiled, "--against", "merged.onnx").code == 0
    data = only_json(run_cli("merge", compiled, "-o", "other.onnx", "--external-data", "--json"))
    assert data == {"path": "other.onnx", "data": "other.onnx.data", "nodes": 5, "segments": 3,
                    "weights_bytes": 32768, "diagnostics": []}  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"merged.onnx", "other.onnx", "other.onnx.data"}


@pytest.mark.parametrize("occupied", ["merged.onnx", "merged.onnx.data"])
def test_existing_files_are_replaced_only_with_force(occupied, run_cli, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(occupied).write_text("mine")
    command = ("merge", compiled, "-o", "merged.onnx", "--external-data")
    refused = run_cli(*command)
    assert refused.code == 2
    assert f"error[U030] {occupied}: it already exists" in refused.err
    assert Path(occupied).read_text() == "mine"
    assert run_cli(*command, "--force").code == 0
    onnx.checker.check_model("merged.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"merged.onnx", "merged.onnx.data"}


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        ("", "U032", "expected the name of a file"),
        ("missing/merged.onnx", "U032", "there is no folder"),
        ("bundle/merged.onnx", "U032", "which is read"),
        (".", "U032", "expected the name of a file"),
    ],
)
def test_impossible_outputs_are_refused(output, code, words, run_cli, bundle_copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = run_cli("merge", "bundle", "-o", output)
    assert result.code == 2
    assert f"error[{code}]" in result.err
    assert words in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_bundle_is_refused(run_cli, bundle_copy, tmp_path):
    weights = bundle_copy / "segments" / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[7] ^= 1
    weights.write_bytes(data)
    result = run_cli("merge", bundle_copy, "-o", tmp_path / "merged.onnx")
    assert "error[N002]" in result.err
    assert not (tmp_path / "merged.onnx").exists()


def test_a_failure_while_the_model_is_built_leaves_nothing(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "build_whole_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merge_bundle(compiled, tmp_path / "merged.onnx", external_data=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_renamed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("ending", [".data", ".onnx"])
def test_an_interrupt_at_a_rename_leaves_both_files_or_none(ending, is_renamed, compiled, tmp_path, monkeypatch):
    actual = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.suffix != ending:
            return actual(self, target)
        if is_renamed:
            actual(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        merge_bundle(compiled, tmp_path / "merged.onnx", external_data=True)
    is_complete = ending == ".onnx" and is_renamed
    assert sorted(item.name for item in tmp_path.iterdir()) == ["merged.onnx", "merged.onnx.data"] * is_complete


def test_the_command_imports_onnx_runtime_never(compiled, tmp_path):
    """A bundle for GPUs can be merged anywhere."""
    code = (
        "import sys; from onnxplace.cli.app import main; "
        f"code = main(['merge', {str(compiled)!r}, '-o', {str(tmp_path / 'm.onnx')!r}, '--json']); "
        "print('onnxruntime' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["nodes"] == 5
    assert ended.stderr.splitlines()[-1] == "False"
