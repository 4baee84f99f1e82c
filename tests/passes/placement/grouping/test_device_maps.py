"""Device maps of accelerate, of Olive, and in ONNX models."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.model.device_metadata import read_device_metadata
from onnxplace.passes.placement.grouping.device_maps import read_pins
from onnxplace.target.target import Device, Target
from tests.support.reference_simulator import graph_of

NAMES = ("/model/embed/Gather", "/model/layers.0/mlp/MatMul", "/model/layers.1/mlp/MatMul", "/model/norm/Mul", "logits")
CPUS = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
GPUS = Target((Device("cuda:1", 1 << 30), Device("cuda:0", 1 << 30), Device("cpu:0", 1 << 30)))


def pins(
    device_map: object, target: Target = CPUS, removed: tuple[str, ...] = (), names: tuple[str, ...] = NAMES
) -> list[str]:
    """Return the devices of nodes, "" for none, and the codes of notes."""
    graph = graph_of({name: [] for name in names})
    source = str(device_map) if isinstance(device_map, str | Path) else json.dumps(device_map)
    pinned, notes = read_pins(source, graph, target, removed)
    return [target.devices[p].id if p >= 0 else "" for p in pinned.tolist()] + [note.code for note in notes]


def test_the_innermost_module_of_accelerates_map_decides():
    rules = {"model.layers": 0, "model.layers.1": 1, "model.norm": "cpu"}
    assert pins(rules) == ["", "cpu:0", "cpu:1", "cpu:0", "", "U025"]
    assert pins({"": 1}) == ["cpu:1"] * 5 + ["U025"]


# As `load` names the nodes of an export with `dynamo=True`.
DYNAMO = ("model.layers.0.mlp/node_relu", "model.layers.1.mlp/node_relu_1", "model.layers.1/node_add", "lm_head/node_x")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"": 1, "lm_head": 0, "model.layers.1.mlp": 0}, ["cpu:1", "cpu:0", "cpu:1", "cpu:0", "U025"]),
        ({"model.layers.1": "cpu:1", "node_add": "cpu:0"}, ["", "cpu:1", "cpu:0", "", "U025"]),
        ({"node_relu_1": "cpu:1"}, ["", "cpu:1", "", "", "U025"]),
        ({r".*\.mlp": "cpu:0", "model.*": "cpu:1"}, ["cpu:0", "cpu:0", "cpu:1", ""]),
        ({"model.layers.1": "cpu:0", "lm_head/node_x": "cpu:1"}, ["", "cpu:0", "cpu:0", "cpu:1"]),
        ({"split_assignments": {"model.layers.0": 1, "lm_head": 0}}, ["cpu:1", "", "", "cpu:0", "U025"]),
    ],
)
def test_maps_name_modules_and_nodes_of_exports_with_dynamo(rules, expected):
    assert pins(rules, names=DYNAMO) == expected


@pytest.mark.parametrize(
    "rules", [{"model.layer.1.mlp": 0}, {"model.layer.1.mlp": "cpu:0"}, {r"model\.layer\.1\.mlp": "cpu:0"}]
)
def test_the_nearest_module_is_offered(rules):
    with pytest.raises(onnxplace.UsageError, match=r"U020.*\n  hint: did you mean 'model.layers.1.mlp'"):
        pins(rules, names=DYNAMO)


def test_numbers_of_accelerate_are_those_of_gpus_where_there_are_some():
    rules = {"model.layers.0": 0, "model.layers.1": 1, "model.norm": "cpu", "model.embed": "cuda:1"}
    assert pins(rules, GPUS) == ["cuda:1", "cuda:0", "cuda:1", "cpu:0", "", "U025"]


def test_modules_may_have_ids_of_devices():
    assert pins({"model": "cpu:1", "model.layers.0": "cpu:0"}) == ["cpu:1", "cpu:0", "cpu:1", "cpu:1", "", "U025"]
    assert pins({"/model/layers.0/mlp/MatMul": "cpu:1"}) == ["", "cpu:1", "", "", ""], "a name of a node is a pattern"


def test_pieces_of_olive_are_positions_of_devices(tmp_path):
    rules = {"model.layers.0": 0, "model.layers.1": 2}
    expected = ["", "cuda:1", "cpu:0", "", "", "U025"]
    assert pins({"split_assignments": rules}, GPUS) == expected
    model = parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Neg(x) }')
    onnx.helper.set_model_props(model, {"split_assignments": ";".join(f"{k}={v}" for k, v in rules.items())})
    onnx.save(model, tmp_path / "olive.onnx")
    assert pins(tmp_path / "olive.onnx", GPUS) == expected
    onnx.helper.set_model_props(model, {"split_assignments": "model.layers.0"})
    onnx.save(model, tmp_path / "olive.onnx")
    with pytest.raises(onnxplace.InputError, match=r"U023.*'model.layers.0'\n  hint: write it like model.layers.0=0"):
        pins(tmp_path / "olive.onnx", GPUS)


def test_modules_without_nodes_are_reported_and_unknown_ones_refused():
    assert pins({"model.dropout": 0, "model.norm": 1}) == ["", "", "", "cpu:1", "", "U025"]
    assert pins({"gone": 0, "model.norm": 1}, removed=("/gone/Identity",))[-1] == "U025"
    with pytest.raises(
        onnxplace.UsageError, match=r"U020.*no module 'modle.layers.0', 'lm_head'.*\n.*'model.layers.0'"
    ):
        pins({"modle.layers.0": 0, "lm_head": 1})


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (2, "no device 2 in this target, for 'model'"),
        (-1, "no device -1"),
        ("disk", "weights cannot stay on disk"),
        ("cuda", "no device 'cuda'"),
        ("cpu:9", "did you mean 'cpu:"),
    ],
)
def test_devices_that_a_foreign_map_lacks_are_named_with_their_module(device, words):
    with pytest.raises(onnxplace.TargetError, match="T005") as refused:
        pins({"model": device, "logits": 0})
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"model.*": 0}, "it names modules, but 'model.*' is a pattern"),
        ({"model": True}, "for 'model', got True"),
        ({"model": None}, "for 'model', got None"),
        ({"split_assignments": {"m": {}}}, "expected the id or the number of a device for 'm', got {}"),
        ([{"model": 0}], "expected an object, got [{'model': 0}]"),
    ],
)
def test_maps_of_no_known_form_are_refused(rules, words, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(rules))
    with pytest.raises(onnxplace.InputError, match=r'U023.*not a device map.*\n  hint: .*"model.layers.0": 0') as error:
        pins(tmp_path / "map.json")
    assert words in error.value.message


def annotated(folder: Path, configuration: str = "", **entry: Any) -> Path:
    """Write a model of the nodes NAMES whose first one has ONNX's metadata."""
    nodes = [onnx.helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=name) for i, name in enumerate(NAMES)]
    values = [onnx.helper.make_tensor_value_info(name, 1, [3]) for name in ("v0", f"v{len(NAMES)}")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", values[:1], values[1:]), ir_version=11)
    if configuration:
        names = configuration.split(",") if configuration != "2" else []
        model.configuration.add(name="c", num_devices=len(names) or 2, device=names)
    if entry:
        item = model.graph.node[0].device_configurations.add(configuration_id="c")
        if "stage" in entry:
            item.pipeline_stage = entry["stage"]
        if "device" in entry or "shards" in entry:
            spec = item.sharding_spec.add(tensor_name="v1", device=entry.get("device", []))
            for key, group in entry.get("groups", {}).items():
                spec.index_to_device_group_map.add(key=key, value=group)
            if "shards" in entry:
                spec.sharded_dim.add(axis=0).simple_sharding.add(num_shards=entry["shards"])
    onnx.save(model, folder / "annotated.onnx")
    return folder / "annotated.onnx"


@pytest.mark.parametrize(
    ("configuration", "entry"),
    [
        ("cpu:0,cpu:1", {"device": [1]}),
        ("2", {"device": [1]}),
        ("2", {"stage": 1}),
        ("cpu:1,cpu:0", {"device": [0]}),
        ("2", {"device": [-1], "groups": {-1: [1]}}),
        ("2", {"device": [-5, 1, 0], "groups": {-5: [1, 1], 0: [1]}}),
        ("", {"device": [1]}),
    ],
)
def test_devices_in_onnx_metadata_are_names_positions_or_stages(configuration, entry, tmp_path):
    assert pins(annotated(tmp_path, configuration, **entry)) == ["cpu:1", "", "", "", "", "U025"]


def test_a_configuration_of_a_thousand_million_devices_costs_no_memory(tmp_path):
    path = annotated(tmp_path, "2", device=[1])
    model = onnx.load(path)
    model.configuration[0].num_devices = 2**31 - 1
    onnx.save(model, path)
    assert pins(path) == ["cpu:1", "", "", "", "", "U025"]
    assert read_device_metadata(path).devices == ()


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["c", "other"], "cpu:1"),
        (["other", "c"], "cpu:0"),
        (["other"], ""),
        (["misspelt"], "cpu:1"),
        (["misspelt", "other"], "cpu:1"),
        (["misspelt", "c"], "cpu:0"),
    ],
)
def test_what_a_node_says_about_another_configuration_does_not_count(named, expected, tmp_path):
    """Positions of another configuration are other devices."""
    model = onnx.load(annotated(tmp_path, "cpu:0,cpu:1", device=[1]))
    model.configuration.add(name="other", num_devices=9)
    (entry,) = model.graph.node[0].device_configurations
    del model.graph.node[0].device_configurations[:]
    for number, name in enumerate(named):
        entry.configuration_id, entry.sharding_spec[0].device[0] = name, 8 if name == "other" else 1 - number % 2
        model.graph.node[0].device_configurations.append(entry)
    model.graph.node[1].device_configurations.add(configuration_id="c").sharding_spec.add(tensor_name="v2", device=[0])
    onnx.save(model, tmp_path / "annotated.onnx")
    assert pins(tmp_path / "annotated.onnx")[:2] == [expected, "cpu:0"]


def test_many_shards_on_a_large_group_take_no_time(tmp_path):
    group = {-1: list(range(20000))}
    path = annotated(tmp_path, ",".join(map(str, group[-1])), device=[-1] * 20000, groups=group, shards=20000)
    assert read_device_metadata(path).split == (NAMES[0],)


@pytest.mark.parametrize("field", ["name", "device"])
def test_names_of_devices_that_are_no_text_are_refused(field, tmp_path):
    path = annotated(tmp_path, "zzzzzz", device=[0])
    model = onnx.load(path)
    model.configuration[0].name = "zzzzzz" if field == "name" else "c"
    model.configuration[0].device[0] = "zzzzzz" if field == "device" else "cpu:0"
    path.write_bytes(model.SerializeToString().replace(b"zzzzzz", b"zz\xff\xfezz"))
    with pytest.raises(onnxplace.ModelError, match=r"M002.*not text"):
        read_device_metadata(path)


@pytest.mark.parametrize(
    ("configuration", "entry", "words"),
    [
        ("", {}, ("U023", "no node of this model names a device")),
        ("npu:0,npu:1", {"device": [1]}, ("T005", "no device 'npu:1'", "cpu:0, cpu:1")),
        ("2", {"stage": 7}, ("T005", "position 7")),
        ("cpu:0,cpu:1", {"device": [0, 1]}, ("U020", "/model/embed/Gather")),
        ("cpu:0,cpu:1", {"device": [-1], "groups": {-1: [0, 1]}}, ("U020", "/model/embed/Gather")),
        ("2", {"device": [0, 2]}, ("U023", "node '/model/embed/Gather'", "'v1' is on 2, expected devices from 0 to 1")),
        ("2", {"device": [-1]}, ("U023", "'v1' is on -1, expected devices from 0 to 1", "index_to_device_group_map")),
        ("", {"device": [-1]}, ("U023", "'v1' is on -1, expected devices from 0 to 2147483647")),
        ("2", {"device": [-1], "groups": {-1: [0, 2]}}, ("U023", "'v1' is on 2, expected devices from 0 to 1")),
        ("2", {"device": [-1], "groups": {-1: [-2], -2: [-1]}}, ("U023", "'v1' is on -2, expected")),
        ("2", {"device": [-1, 0], "groups": {-1: []}}, ("U023", "'v1' is on -1, expected")),
    ],
)
def test_metadata_that_pins_nothing_is_refused(configuration, entry, words, tmp_path):
    with pytest.raises(onnxplace.OnnxplaceError) as refused:
        pins(annotated(tmp_path, configuration, **entry))
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    "entry",
    [
        {"device": [-1], "groups": {-1: [0, 1]}},
        {"device": [0, 1]},
        {"shards": 2},
        {"device": [0, 0, 1], "shards": 3},
        {"device": [-1, -2], "groups": {-1: [0], -2: [1]}, "shards": 2},
        {"device": [-1], "groups": {-1: [0, 1]}, "stage": 1},
    ],
)
def test_nodes_on_a_group_or_on_several_devices_are_free(entry, tmp_path):
    path = annotated(tmp_path, "cpu:0,cpu:1", **entry)
    model = onnx.load(path)
    model.graph.node[1].device_configurations.add(configuration_id="c").sharding_spec.add(tensor_name="v2", device=[1])
    onnx.save(model, path)
    graph = graph_of({name: [] for name in NAMES})
    pinned, (note,) = read_pins(str(path), graph, CPUS, ())
    assert pinned.tolist() == [-1, 1, -1, -1, -1]
    assert "1 node on several devices, such as '/model/embed/Gather'" in note.message


def test_a_model_of_other_names_is_refused(tmp_path):
    path = annotated(tmp_path, "cpu:0,cpu:1", device=[1])
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Neg(x) }'
    with pytest.raises(onnxplace.UsageError, match=r"U020.*annotated.onnx: no node has a name"):
        onnxplace.compile(parser.parse_model(text), tmp_path / "b", devices="cpu:0,cpu:1", device_map=path)
