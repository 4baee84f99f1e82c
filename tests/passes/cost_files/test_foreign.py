"""Cost files of other programs: ONNX Runtime's memory statistics of nodes, and Olive's cost model."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, strategies as st
from onnx import parser

import onnxplace
from onnxplace.errors import InputError, ModelError
from onnxplace.facts import Profile, Source
from onnxplace.machine import local_target
from onnxplace.model import Model, bind, load
from onnxplace.passes.cost_files.ort_node_memory import node_hash
from onnxplace.passes.profiling import count_operations, typical_peaks
from onnxplace.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target import Device, Target

CONVOLUTION_TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 3, 16, 16] x, float[8, 3, 3, 3] w) => (float[batch, 8, 16, 16] y, int64[4, n] where)
{
    [conv] a = Conv<pads=[1, 1, 1, 1]>(x, w)
    b = Relu(a)
    [find] where = NonZero(b)
    y = Add(b, b)
}"""
HEAD = "#name,input_sizes,initializers_sizes,total_dynamic_sizes,total_temp_allocations\n"

LAYERS_TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (int64[batch, seq] ids) => (float[batch, seq, 16] y)
<float[100, 8] table, float[8, 16] up, float[16] bias, float[16, 16] down>
{
    ["/model/embed_tokens/Gather"] h = Gather(table, ids)
    ["/model/layers.0/mlp/up/MatMul"] u = MatMul(h, up)
    ["/model/layers.0/mlp/up/Add"] v = Add(u, bias)
    ["/model/layers.0/mlp/act_fn/Sigmoid"] s = Sigmoid(v)
    ["/model/layers.0/mlp/Mul"] m = Mul(s, v)
    ["/model/layers.0/mlp/down/MatMul"] d = MatMul(m, down)
    ["/Tanh"] y = Tanh(d)
}"""
CORE = Target((Device("cpu:0", 1 << 30),))
# As Olive writes it: modules without children, in half precision, operations for one position.
OLIVE = """module,num_params,num_bytes,num_flops
model.embed_tokens,800,1600,1
model.layers.0.mlp.up,144,288,288
model.layers.0.mlp.down,256,512,512
model.layers.0.mlp.act_fn,0,0,96
model.layers.0.dropout,0,0,0
"""


def convolution_model(batch: int = 2) -> Model:
    return bind(load(parser.parse_model(CONVOLUTION_TEXT)), {"batch": batch}, {})


def layered_model() -> Model:
    return bind(load(with_weights(parser.parse_model(LAYERS_TEXT))), {"batch": 2, "seq": 5}, {})


def with_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with values for the weights that its text only declares."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.value_info}
    for name, shape in shapes.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    del proto.graph.value_info[:]
    return proto


def write_statistics(path: Path, *batches: int, optimised: bool = False) -> Path:
    """Run the model with these batches and let ONNX Runtime write its statistics."""
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(path))
    proto = parser.parse_model(CONVOLUTION_TEXT).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    for batch in batches:
        feeds = {"x": np.ones((batch, 3, 16, 16), np.float32), "w": np.ones((8, 3, 3, 3), np.float32)}
        session.run(None, feeds)
    del session
    return path


def profile_model(model: Model, path: Path | None, options: str = "estimate=true", target: Target = CORE) -> State:
    text = f"profile{{{options}{f',costs={path}' if path else ''}}}"
    return Pipeline.parse(text).run(State(target).with_facts(model))[0]


def codes(state: State) -> list[str]:
    return [note.code for note in state.diagnostics]


def seconds(state: State) -> np.ndarray:
    return next(iter(state[Profile].seconds.values()))


def test_statistics_of_onnxruntime_give_workspace_and_unknown_sizes(tmp_path):
    model = convolution_model()
    path = write_statistics(tmp_path / "stats.csv", 2)
    plain = profile_model(model, None)
    state = profile_model(model, path)
    graph = state[Profile].graph
    columns = {line.split("_")[0]: line.rsplit(",", 2)[1:] for line in path.read_text().splitlines()[1:]}
    assert dict(zip(graph.ops, graph.workspace_bytes.tolist()))["Conv"] == int(columns["conv"][1]) > 0
    sizes = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    count = 2 * 8 * 16 * 16  # NonZero finds every element, at four numbers each
    assert count * 4 * 8 <= sizes["where"] == int(columns["find"][0])
    assert sizes["a"] == dict(zip(graph.value_names, plain[Profile].graph.value_bytes.tolist()))["a"]
    assert dict(zip(graph.value_names, plain[Profile].graph.value_bytes.tolist()))["where"] == 0
    assert codes(state) == ["C007", "C001"]
    assert "the workspace of 4 of 4 nodes is from the file" in state.diagnostics[0].message
    assert (seconds(state) == seconds(plain)).all()


def test_statistics_are_the_maximum_of_all_runs(tmp_path):
    model = convolution_model()
    sizes = []
    for batches in ((2,), (2, 2, 2), (2, 4)):
        graph = profile_model(model, write_statistics(tmp_path / "stats.csv", *batches))[Profile].graph
        sizes.append(dict(zip(graph.value_names, graph.value_bytes.tolist()))["where"])
    assert sizes[0] == sizes[1] < sizes[2]


def test_statistics_do_not_replace_measurements(tmp_path):
    state = profile_model(
        convolution_model(),
        write_statistics(tmp_path / "stats.csv", 2),
        "repeat=3,seconds=0,cache=false",
        local_target("cpu:0"),
    )
    assert codes(state)[0] == "C007"
    assert "C001" not in codes(state)
    (sources,) = state[Profile].sources.values()
    assert set(sources.tolist()) <= {Source.MEASURED, Source.KNOWN}
    assert state[Profile].graph.workspace_bytes.max() > 0


def test_kernels_are_matched_by_name_or_reported(tmp_path):
    path = tmp_path / "stats.csv"
    relu = node_hash(parser.parse_model(CONVOLUTION_TEXT).graph.node[1])
    path.write_text(
        f"{HEAD}conv_1,0,0,256,700\nb_nchwc_2,0,0,256,900\nRelu_{relu},0,0,0,64\nReorderOutput_token_3_4,0,0,0,5\n"
    )
    state = profile_model(convolution_model(), path)
    workspace = dict(zip(state[Profile].graph.ops, state[Profile].graph.workspace_bytes.tolist()))
    assert workspace == {"Conv": 700, "Relu": 900, "NonZero": 0, "Add": 0}
    assert codes(state)[:2] == ["C007", "C008"]
    assert "1 of the 4 nodes in the file are not in the model" in state.diagnostics[1].message
    assert "such as ReorderOutput_token_3_4; their workspace is at most 5 bytes" in state.diagnostics[1].message


def test_statistics_with_all_optimisations_are_read(tmp_path):
    state = profile_model(convolution_model(), write_statistics(tmp_path / "stats.csv", 2, optimised=True))
    assert codes(state)[0] == "C007"


@given(st.lists(st.text("abc/._:é0", max_size=40), min_size=1, max_size=4), st.text("xy/.1", min_size=1, max_size=40))
def test_the_hash_of_a_node_depends_on_its_inputs_and_outputs(inputs, output):
    node = onnx.helper.make_node("Concat", inputs, [output])
    assert node_hash(node) == node_hash(onnx.helper.make_node("Other", inputs, [output], name="named"))
    assert node_hash(node) != node_hash(onnx.helper.make_node("Concat", [*inputs, output], [output]))
    assert 0 <= int(node_hash(node)) < 1 << 64


def test_the_hash_is_that_of_onnxruntime(tmp_path):
    """Names of all lengths cover each branch of the hash."""
    nodes = [onnx.helper.make_node("Neg", ["x"], ["v"])]
    for length in range(1, 40):
        nodes.append(onnx.helper.make_node("Neg", [nodes[-1].output[0]], ["é" * (length // 3) + "w" * length]))
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "g", [value("x", 1, [2])], [value(nodes[-1].output[0], 1, [2])])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(tmp_path / "stats.csv"))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones(2, np.float32)})
    del session
    node_names = {line.split(",")[0] for line in (tmp_path / "stats.csv").read_text().splitlines()[1:]}
    assert node_names == {f"Neg_{node_hash(node)}" for node in proto.graph.node}


def test_modules_of_olive_set_the_times_of_their_nodes(tmp_path):
    path, model = tmp_path / "cost.csv", layered_model()
    path.write_text(OLIVE)
    state = profile_model(model, path)
    plain = profile_model(model, None)
    assert codes(state) == ["C007", "C001"]
    assert "5 of 7 nodes are in 4 of the 5 modules in the file" in state.diagnostics[0].message
    assert "estimates were requested" in state.diagnostics[1].message
    peaks = typical_peaks("cpu")
    positions = 2 * 5
    # Weights of the file, distributed in proportion to those of the model; activations of the model.
    work = {
        0: (1 * positions, 2 * 10 * 8 * 4 / 2 + 10 * 8 * 2),
        1: (288 * positions * 2560 / 2720, 10 * 8 * 4 + 256 + 10 * 16 * 4),
        2: (288 * positions * 160 / 2720, 10 * 16 * 4 + 32 + 10 * 16 * 4),
        3: (96 * positions, 2 * 10 * 16 * 4),
        5: (512 * positions, 10 * 16 * 4 + 512 + 10 * 16 * 4),
    }
    expected = seconds(plain).copy()
    for node, (node_operations, moved) in work.items():
        expected[node] = (
            max(node_operations / peaks.operations_per_second, moved / peaks.bytes_per_second) + peaks.kernel_seconds
        )
    np.testing.assert_allclose(seconds(state)[1:], expected[1:], rtol=1e-9)
    assert set(next(iter(state[Profile].sources.values())).tolist()) == {Source.ESTIMATED}


def test_a_lookup_moves_the_selected_rows_only(tmp_path):
    path, model = tmp_path / "cost.csv", layered_model()
    path.write_text("module,num_params,num_bytes\nmodel.embed_tokens,1e9,1e9\n")
    assert seconds(profile_model(model, path))[0] < 1e9 / typical_peaks("cpu").bytes_per_second


def layer_operations(text: str, path: Path) -> np.ndarray:
    """Return the operations of each node, derived from times without memory traffic."""
    path.write_text("module,num_params,num_bytes,num_flops\n" + text)
    return (
        (seconds(profile_model(layered_model(), path)) - typical_peaks("cpu").kernel_seconds)
        * typical_peaks("cpu").operations_per_second
        / 10
    )


def test_the_innermost_module_counts_and_only_once(tmp_path):
    counts = layer_operations(
        "model.layers.0.mlp,0,0,1e9\nmodel.layers.0.mlp.up,0,0,3e8\nmodel,0,0,5e9\n", tmp_path / "cost.csv"
    )
    assert counts[1] + counts[2] == pytest.approx(3e8)
    assert counts[3:6].sum() == pytest.approx(1e9 - 3e8)
    assert counts[0] == pytest.approx(5e9 - 1e9)
    assert counts[:6].sum() == pytest.approx(5e9)


def test_figures_of_modules_without_nodes_stay_in_the_enclosing_module(tmp_path):
    counts = layer_operations("model.layers.0.mlp,0,0,1e9\nmodel.layers.0.mlp.gone,0,0,6e8\n", tmp_path / "cost.csv")
    assert counts[1:6].sum() == pytest.approx(1e9)


def test_operations_that_a_file_lacks_are_counted_in_the_model(tmp_path):
    path, model = tmp_path / "cost.csv", layered_model()
    path.write_text("module,num_params,num_bytes,num_flops\nmodel.layers.0.mlp.down,1,1e6,0\n")
    node_operations = count_operations(model.nodes[5], {"m": (2, 5, 16), "d": (2, 5, 16), "down": (16, 16)})
    node_seconds = seconds(profile_model(model, path))[5]
    peaks = typical_peaks("cpu")
    moved = 2 * 10 * 16 * 4 + 1e6
    assert node_seconds == pytest.approx(
        max(node_operations / peaks.operations_per_second, moved / peaks.bytes_per_second) + 2e-6
    )


def test_modules_are_found_in_the_metadata_of_the_exporter(tmp_path):
    path = tmp_path / "cost.csv"
    path.write_text("module,num_params,num_bytes,num_flops\nmodel.mlp.up,0,0,1e9\nmodel.mlp,0,0,0\n")
    proto = with_weights(parser.parse_model(LAYERS_TEXT))
    for number, node in enumerate(proto.graph.node):
        node.name = f"node_{number}"
    scopes = "['', 'model', 'model.mlp', 'model.mlp.up', 'linear']"
    proto.graph.node[1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    state = profile_model(bind(load(proto), {"batch": 2, "seq": 5}, {}), path)
    assert "1 of 7 nodes are in 1 of the 2 modules" in state.diagnostics[0].message
    assert seconds(state)[1] == pytest.approx(1e10 / typical_peaks("cpu").operations_per_second, rel=1e-3)


def test_times_scale_with_cores_and_kinds_of_devices(tmp_path):
    path = tmp_path / "cost.csv"
    path.write_text("module,num_params,num_bytes,num_flops\nmodel.layers.0.mlp.down,0,0,1e12\n")
    target = Target((Device("cpu:0", 1 << 30, cores=4), Device("cuda:0", 1 << 30, model="NVIDIA H100")))
    state = profile_model(layered_model(), path, target=target)
    node_seconds = {kind: array[5] for kind, array in state[Profile].seconds.items()}
    assert node_seconds["cpu/4"] == pytest.approx(1e13 / (4 * typical_peaks("cpu").operations_per_second))
    assert node_seconds["cuda/NVIDIA H100"] == pytest.approx(
        1e13 / typical_peaks("cuda").operations_per_second, rel=1e-4
    )


INVALID_FILES = [
    (HEAD.replace(",total_temp_allocations", "") + "conv_1,0,0,0\n", "C011", "without total_temp_allocations"),
    (HEAD + "conv_1,0,0,0,x\n", "C015", "line 2: total_temp_allocations is 'x'"),
    (HEAD + "conv_1,0,0,0,-4\n", "C015", "line 2: total_temp_allocations is '-4'"),
    (HEAD + "conv_1,0,0,nan,4\n", "C015", "line 2: total_dynamic_sizes is 'nan'"),
    (HEAD + "\nconv_1,0,0\n", "C015", "line 3: total_dynamic_sizes is missing"),
    (HEAD + "other_1,0,0,0,4\nmore_2,0,0,0,4\n", "C010", "none of the 2 nodes in it is in the model, such as other_1"),
    (HEAD, "C010", "none of the 0 nodes in it is in the model"),
    ("module,num_params\nmodel,1\n", "C011", "Olive's cost model without num_bytes"),
    ("module,num_params,num_bytes\nmodel,1,many\n", "C015", "module 'model': num_bytes is 'many'"),
    ("module,num_params,num_bytes\nmodel,1,-1\n", "C015", "module 'model': num_bytes is '-1'"),
    ("module,num_params,num_bytes,num_flops\nmodel,1,2,NaN\n", "C015", "module 'model': num_flops is 'NaN'"),
    ("module,num_params,num_bytes,num_flops\nmodel,1,2,inf\n", "C015", "module 'model': num_flops is 'inf'"),
    ("module,num_params,num_bytes,num_flops\nmodel,1,2\n", "C015", "module 'model': num_flops is missing"),
    ("module,num_params,num_bytes\nmodel,1,1\nmodel,1,1\n", "C015", "module 'model' has two rows"),
    ("module,num_params,num_bytes\nbert.encoder,1,1\n", "C010", "none of the 1 modules in it is in the model, such"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "message"), INVALID_FILES)
def test_an_invalid_foreign_file_is_refused(tmp_path, text, code, message):
    (tmp_path / "costs.csv").write_text(text)
    with pytest.raises((InputError, ModelError), match=re.escape(message)) as raised:
        profile_model(convolution_model(), tmp_path / "costs.csv")
    assert (raised.value.code, raised.value.where) == (code, str(tmp_path / "costs.csv"))
    assert raised.value.hint


def test_foreign_files_work_from_python_and_travel_in_the_bundle(tmp_path):
    onnx.save(parser.parse_model(CONVOLUTION_TEXT), tmp_path / "model.onnx")
    path = write_statistics(tmp_path / "statistics.txt", 2)
    bundle = onnxplace.compile(
        tmp_path / "model.onnx", tmp_path / "bundle", devices="cpu:0", costs=path, shape={"batch": 2}
    )
    costs = json.loads((bundle.path / "costs.json").read_text())
    assert costs["nodes"]["conv"]["workspace_bytes"] > 0
    again = profile_model(convolution_model(), bundle.path / "costs.json", target=local_target("cpu:0"))
    assert again[Profile].graph.workspace_bytes.max() == costs["nodes"]["conv"]["workspace_bytes"]


def test_foreign_files_work_from_the_command_line(run_cli, tmp_path):
    proto = with_weights(parser.parse_model(LAYERS_TEXT))
    onnx.save(proto, tmp_path / "model.onnx")
    (tmp_path / "cost.csv").write_text(OLIVE)
    options = ("--shape", "batch=2,seq=5", "--devices", "cpu:0", "--costs", tmp_path / "cost.csv", "--json")
    ran = run_cli("compile", tmp_path / "model.onnx", *options)
    assert ran.code == 0, ran.err
    notes = {note["code"]: note["message"] for note in json.loads(ran.out)["diagnostics"]}
    assert "the cost file holds work, no times" in notes["C001"]
    assert "of the 5 modules in the file" in notes["C007"]
