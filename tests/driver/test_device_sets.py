"""Devices that share processors: other providers, faster types and spans, and strategies over sets of them."""

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.driver.choose import list_device_sets
from onnxplace.errors import OnnxplaceError
from onnxplace.machine import hardware
from onnxplace.machine.hardware import local_target
from onnxplace.target.parsing import DeviceSpec
from onnxplace.target.target import Device, Pool, Target, count_cores_by_processor
from tests.support.half_device import offer_kind
from tests.support.other_cores import OtherCores


@pytest.fixture
def other(monkeypatch):
    monkeypatch.setattr(
        hardware, "probe_device", lambda device: None
    )  # each probe of an isolated device starts processes
    with offer_kind(OtherCores):
        yield


def list_ids(target):
    return [device.id for device in target.devices]


def test_a_provider_adds_devices_on_the_same_processors_and_spans(other):
    target = local_target("cpu:0,cpu:1", ["other"])
    spans = ["cpu:0-1", "other/cpu:0-1"]
    assert list_ids(target) == ["cpu:0", "cpu:1", "other/cpu:0", "other/cpu:1", *spans]
    assert target.processors.astype(int).tolist() == [[1, 0], [0, 1], [1, 0], [0, 1], [1, 1], [1, 1]]
    (pool,) = target.pools
    assert pool == Pool(tuple(list_ids(target)), target.devices[0].memory_bytes + target.devices[1].memory_bytes)
    assert [device.cores for device in target.devices] == [1, 1, 1, 1, 2, 2]
    assert sum(count_cores_by_processor(target.devices).values()) == 2


def test_a_maximum_error_adds_the_faster_types_of_devices(other):
    assert list_ids(local_target("cpu:0,cpu:1", has_max_error=True)) == ["cpu:0", "cpu:1", "cpu:0-1"]
    target = local_target("cpu:0", ["other"], has_max_error=True)
    assert list_ids(target) == ["cpu:0", "other/cpu:0", "other/cpu:0/bfloat16"]
    assert [device.precision for device in target.devices] == ["float32", "float32", "bfloat16"]
    assert len({device.cost_class for device in target.devices}) == 3
    named = local_target("other/cpu:0{precision=bfloat16}", has_max_error=True)
    assert list_ids(named) == ["other/cpu:0"], "the user chose"


def test_an_unknown_provider_is_refused_with_a_suggestion(other):
    with pytest.raises(OnnxplaceError, match=r"'openvin' is no other provider for cpu:0") as caught:
        local_target("cpu:0", ["openvin"])
    assert "openvino" in caught.value.hint
    with pytest.raises(OnnxplaceError, match="excludes `machine`"):
        onnxplace.plan("m.onnx", machine="H100", providers="other")


@pytest.mark.parametrize(
    ("options", "variants"),
    [({}, ["cuda:0/tf32"]), ({"provider": "tensorrt"}, ["cuda:0/float16", "cuda:0/bfloat16"])],
)
def test_a_gpu_gets_the_faster_types_of_its_provider(options, variants):
    ways = hardware._add_alternatives([DeviceSpec("cuda:0", options)], [], has_max_error=True)
    assert [way.id for way in ways] == ["cuda:0", *variants]
    for way in ways:
        Device(way.id, 1, options=way.options)  # which refuses options that do not exist


def test_more_threads_than_cores_are_refused():
    with pytest.raises(OnnxplaceError, match=r"threads=99 is more than the \d+ cores of this machine"):
        local_target("cpu:0{threads=99}")


def test_sets_of_devices_compute_side_by_side(other):
    target = local_target("cpu:0,cpu:1", ["other"])
    assert list_device_sets(target) == [
        ("cpu:0", "cpu:1"),
        ("other/cpu:0", "other/cpu:1"),
        ("cpu:0-1",),
        ("other/cpu:0-1",),
        (),
    ]
    gpu = Device("cuda:0", 1, model="H100")
    mixed = Target((gpu, *(Device(name, 1, processors=("a",)) for name in ("cpu:0", "other/cpu:0"))))
    assert list_device_sets(mixed) == [("cuda:0", "cpu:0"), ("cuda:0", "other/cpu:0"), ()]
    clashing = Target(tuple(Device(f"cpu:{number}", 1, processors=("a",)) for number in range(2)))
    assert list_device_sets(clashing) == [()]


@pytest.fixture
def layers(tmp_path):
    """Return a model of five products with Relu, as a file."""
    weights = ", ".join(["0.1"] * 4096)
    body = " ".join(f"[m{i}] m{i} = MatMul(r{i}, w) [r{i}] r{i + 1} = Relu(m{i})" for i in range(5))
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    layers (float[8, 64] r0) => (float[8, 64] r5) <float[64, 64] w = {{{weights}}}> {{ {body} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "layers.onnx")
    return tmp_path / "layers.onnx"


def write_costs(path, products, others):
    """Write costs: milliseconds of each product, and of each Relu, by cost class."""
    classes = list(products)
    rows = [",".join(["node", *(f"seconds {name}" for name in classes)])]
    for number in range(5):
        for kind, seconds in (("m", products), ("r", others)):
            rows.append(",".join([f"{kind}{number}", *(str(seconds[name] / 1000) for name in classes)]))
    path.write_text("\n".join(["# onnxplace-costs 1", *rows, ""]), encoding="utf-8")
    return path


OTHER = "other/cpu/Other 1"


def compile_by_costs(model, folder, devices, products, others, **options):
    """Return the manifest of a bundle by given costs, and the types of operators by device."""
    costs = write_costs(folder / "costs.csv", products, others)
    bundle = onnxplace.compile(model, folder / "b", devices=devices, costs=costs, force=True, shard="off", **options)
    operators: dict[str, set[str]] = {}
    for segment in bundle.manifest.segments:
        nodes = onnx.load(bundle.file(segment.file)).graph.node
        operators.setdefault(segment.device, set()).update(node.op_type for node in nodes)
    return bundle.manifest, operators


def test_each_node_runs_where_it_is_fastest_on_one_processor(other, layers, tmp_path):
    products, others = {"cpu/2": 50.0, f"{OTHER}/2": 10.0}, {"cpu/2": 1.0, f"{OTHER}/2": 40.0}
    manifest, operators = compile_by_costs(layers, tmp_path, "cpu:0,other/cpu:0", products, others)
    assert operators == {"other/cpu:0": {"MatMul"}, "cpu:0": {"Relu"}}
    assert manifest.predicted.step_seconds >= 0.055, "they take turns"


def test_one_session_on_all_cores_is_kept_where_it_is_faster(other, layers, tmp_path):
    alone = {"cpu/1": 10.0, f"{OTHER}/1": 9.0}
    products = {**alone, "cpu/2": 4.0, f"{OTHER}/2": 6.0}
    by_kind = dict.fromkeys(products, 0.1)
    manifest, _ = compile_by_costs(layers, tmp_path, "cpu:0,cpu:1", products, by_kind, providers="other")
    assert [device.id for device in manifest.target.devices] == ["cpu:0-1"]
    (target_device,) = manifest.target.devices
    assert (target_device.cores, target_device.processors) == (2, ("cpu:0", "cpu:1"))


def test_a_bundle_over_devices_that_share_processors_computes_the_model(layers, tmp_path):
    bundle = onnxplace.compile(layers, tmp_path / "b", devices="cpu:0,cpu:1,cpu")
    feeds = {"r0": np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)}
    with onnxplace.InferenceSession(bundle.path) as session:
        (found,) = session.run(None, feeds)
    expected = feeds["r0"]
    for _ in range(5):
        expected = np.maximum(expected @ np.full((64, 64), 0.1, np.float32), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    (note,) = [note for note in bundle.manifest.diagnostics if note.code == "P062"]
    assert {figure.name.partition(" on ")[2] for figure in note.figures} >= {"cpu:0, cpu:1", "cpu:0-1"}
