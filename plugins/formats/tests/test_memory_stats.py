"""ONNX Runtime's table of the memory of nodes: written for its budgets, and read into costs."""

import csv
import json

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, strategies as st
from onnx import NodeProto, helper

import onnxplace
from models import MODELS
from onnxplace.driver.compile import compile_model
from onnxplace.errors import InputError
from onnxplace.export.exporting import export_bundle
from onnxplace.target.target import Device, Target
from onnxplace_formats.memory_stats import NodeMemory, format_stats, name_with_hash, read_stats
from tests.export.samples import draw_feeds
from tests.support.commands import only_json

GIB = 1 << 30
WITH_GPU = Target((Device("cpu:0", 8 * GIB), Device("cuda:0", 8 * GIB, kernel_seconds=1e-6)))
HEADER = "#name,input_sizes,initializers_sizes,total_dynamic_sizes,total_temp_allocations\n"


def collect_stats(model, feeds, path, **entries):
    """Let ONNX Runtime write the table of a model as it is, without optimisations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.enable_mem_pattern = 4, False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(path))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    del session
    with path.open() as stream:
        return {row[0]: list(map(int, row[1:])) for row in list(csv.reader(stream))[1:]}


def export_with_gpu(folder, name="two-encoders"):
    pipeline = "optimize,profile{estimate=true},coplace,one-session,split,emit"
    bundle = compile_model(MODELS[name].build(), folder / "b", target=WITH_GPU, pipeline=pipeline).bundle
    export_bundle(bundle, "ort-layers", folder / "out")
    return bundle, folder / "out"


@pytest.mark.parametrize("name", ["two-encoders", "squeezenet"])
def test_the_rows_are_those_of_onnx_runtime(name, tmp_path):
    bundle, folder = export_with_gpu(tmp_path, name)
    with (folder / "memory.csv").open() as stream:
        header, *rows = csv.reader(stream)
    assert ",".join(header) + "\n" == HEADER
    measured = collect_stats(folder / "model.onnx", draw_feeds(bundle), tmp_path / "stats.csv")
    written = {row[0]: list(map(int, row[1:])) for row in rows}
    assert written.keys() == measured.keys()
    # ONNX Runtime counts what a node writes in the place of its input as an input, weights on the CPU too, and no view.
    expected, total = (sum(sum(row[:3]) for row in table.values()) for table in (measured, written))
    assert 0.95 * expected < total < 1.3 * expected


def test_onnx_runtime_takes_the_table_as_the_base_of_a_budget(tmp_path):
    _, folder = export_with_gpu(tmp_path)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.resource_cuda_partitioning_settings", "1000,memory.csv")
    onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    (folder / "memory.csv").write_text(HEADER + "n,1,2\n")
    with pytest.raises(Exception, match="Invalid line"):
        onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def test_exports_without_cuda_have_no_table(decoder_bundle, tmp_path):
    assert "memory.csv" not in export_bundle(decoder_bundle, "ort-layers", tmp_path / "out").files


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40), min_size=1, max_size=3))
def test_names_of_any_length_are_hashed_to_64_bits(names):
    name = name_with_hash(NodeProto(name="n", input=names, output=["y"]))
    assert name.startswith("n_")
    assert 0 <= int(name.removeprefix("n_")) < 1 << 64


@pytest.mark.parametrize("length", [0, 1, 7, 15, 16, 17, 31, 32, 33, 48])
def test_hashes_are_those_of_onnx_runtime(length, tmp_path):
    value = "v" * length or "x"
    node = helper.make_node("Relu", [value], ["output"], name="node")
    info = [helper.make_tensor_value_info(item, onnx.TensorProto.FLOAT, [2]) for item in (value, "output")]
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    stats = collect_stats(model.SerializeToString(), {value: np.zeros(2, np.float32)}, tmp_path / "stats.csv")
    assert list(stats) == [name_with_hash(node)]


def test_what_is_written_is_read_again(tmp_path):
    rows = {"a_1": NodeMemory(1, 2, 3, 4), "a_2": NodeMemory(4, 3, 2, 1), "b": NodeMemory(0, 0, 0, 9)}
    (tmp_path / "stats.csv").write_text(format_stats(rows))
    assert read_stats(tmp_path / "stats.csv") == {"a": NodeMemory(4, 3, 3, 4), "b": NodeMemory(0, 0, 0, 9)}


def test_names_that_would_break_the_table_are_left_out(tmp_path):
    names = ["a,b", "c\nd", '"e"', "f(g)=;"]
    rows = {f"{name}_1": NodeMemory(1, 2, 3, 4) for name in names}
    (tmp_path / "memory.csv").write_text(format_stats(rows))
    assert list(read_stats(tmp_path / "memory.csv")) == names[2:]
    onnx.save(MODELS["squeezenet"].build(), tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.resource_cuda_partitioning_settings", "1000,memory.csv")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])


def test_marks_and_line_ends_of_windows_are_read(tmp_path):
    (tmp_path / "stats.csv").write_bytes(b"\xef\xbb\xbf" + f"{HEADER}a_1,1,2,3,4\n".replace("\n", "\r\n").encode())
    assert read_stats(tmp_path / "stats.csv") == {"a": NodeMemory(1, 2, 3, 4)}


@pytest.mark.parametrize(
    "text", ["", HEADER, "a,b\n", HEADER + "a,1,2,3\n", HEADER + "a,1,2,3,x\n", HEADER + "a,1,2,3,-1\n"]
)
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "stats.csv").write_text(text)
    with pytest.raises(InputError, match="C011"):
        read_stats(tmp_path / "stats.csv")


def test_the_command_adds_what_nodes_take_while_they_run(run_cli, tmp_path):
    onnx.save(MODELS["two-encoders"].build(), tmp_path / "model.onnx")
    pipeline = "optimize,profile{estimate=true},coplace,single,split,emit"
    bundle = compile_model(tmp_path / "model.onnx", tmp_path / "b", devices="cpu:0", pipeline=pipeline).bundle
    collect_stats(bundle.file("segments/whole.onnx"), draw_feeds(bundle), tmp_path / "stats.csv")
    costs, output = bundle.path / "costs.json", tmp_path / "costs.json"
    result = run_cli("memory-stats", tmp_path / "stats.csv", "--costs", costs, "-o", output, "--json")
    assert result.code == 0, result.err
    assert (only_json(result)["unknown"], only_json(result)["nodes"] > 10) == ([], True)
    nodes = json.loads(output.read_text())["nodes"]
    assert max(entry["workspace_bytes"] for entry in nodes.values()) > 100_000
    again = onnxplace.compile(tmp_path / "model.onnx", tmp_path / "again", devices="cpu:0", costs=output, trial=False)
    (before,), (after,) = (item.manifest.segments for item in (bundle, again))
    assert after.workspace_bytes > before.workspace_bytes


def test_statistics_of_another_model_are_an_error_that_shows_its_nodes(run_cli, tmp_path):
    (tmp_path / "stats.csv").write_text(HEADER + "other_1,0,0,0,1\n")
    (tmp_path / "costs.json").write_text('{"nodes": {"a": {"seconds": {}}}}')
    arguments = ("memory-stats", tmp_path / "stats.csv", "--costs", tmp_path / "costs.json", "-o", tmp_path / "o.json")
    result = run_cli(*arguments)
    assert (result.code, result.err[:11]) == (2, "error[C011]"), result.err
    assert "'other'" in result.err
    (tmp_path / "costs.json").write_text("[]")
    assert "not a cost file" in run_cli(*arguments).err
    (tmp_path / "costs.json").write_text('{"nodes": {"other": 5}}')
    assert "not a cost file" in run_cli(*arguments).err
    (tmp_path / "costs.csv").write_text("node,seconds\n")
    result = run_cli(*arguments[:3], tmp_path / "costs.csv", *arguments[4:])
    assert "expected costs as JSON, not CSV" in result.err
