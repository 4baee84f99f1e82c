"""Bundles of one model become the plans of one bundle, which holds each weight once and can be moved elsewhere."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import SizeRecord
from onnxplace.driver import plan_sets
from onnxplace.driver.join_plans import join_plans
from onnxplace.errors import BundleError

WIDTH, LAYERS = 64, 4
WEIGHT_BYTES = WIDTH * WIDTH * 4
ONE_DEVICE = "optimize,profile{estimate=true},coplace,single,split,emit"
SIZES = [
    SizeRecord(dimensions={"batch": 1}, seconds=(1e-3, 2e-3), weight=1),
    SizeRecord(dimensions={"batch": 8}, seconds=(4e-3, 3e-3), weight=1),
]


@pytest.fixture
def model(tmp_path) -> Path:
    """A chain of layers with a symbolic batch, in a file with its weights beside it."""
    random = np.random.default_rng(0)
    nodes = [f"[layer{n}] h{n + 1} = MatMul(h{n}, w{n})\n[act{n}] a{n + 1} = Relu(h{n + 1})" for n in range(LAYERS)]
    text = "\n".join(nodes).replace("MatMul(h", "MatMul(a").replace("MatMul(a0", "MatMul(x")
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> chain (float[batch, {WIDTH}] x) => (float[batch, {WIDTH}] a{LAYERS}) '
        f"{{ {text} }}"
    )
    for number in range(LAYERS):
        weight = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
        proto.graph.initializer.append(numpy_helper.from_array(weight, f"w{number}"))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="model.weights")
    return path


def compile_part(model: Path, name: str, **options) -> Bundle:
    defaults = {"devices": "cpu:0,cpu:1", "shape": {"batch": 8}, "trial": False}
    if not {"shard_map", "device_map"} & options.keys():
        defaults["pipeline"] = ONE_DEVICE
    return onnxplace.compile(model, model.parent / name, **{**defaults, **options})


def run(bundle: Bundle, batch: int) -> np.ndarray:
    with onnxplace.InferenceSession(bundle) as session:
        return session.run(None, {"x": np.random.default_rng(batch).standard_normal((batch, WIDTH), np.float32)})[0]


def list_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def joined(model) -> Bundle:
    """The chain on one device, and placed on two."""
    placed = compile_part(model, "placed", device_map={"(layer|act)[01]": "cpu:0", ".*": "cpu:1"})
    return join_plans([compile_part(model, "alone"), placed], {}, SIZES)


def test_each_plan_runs_and_every_weight_is_on_disk_once(joined):
    opened = Bundle.open(joined.path, "all")
    assert [len({segment.device for segment in plan.manifest.segments}) for plan in opened.plans] == [1, 2]
    assert opened.manifest.sizes == tuple(SIZES)
    for batch in (1, 8):
        outputs = [run(plan, batch) for plan in opened.plans]
        np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    assert (joined.path / "segments/weights.bin").stat().st_size == LAYERS * WEIGHT_BYTES
    assert (joined.path / "plan1/segments/weights.bin").stat().st_size == 0


def test_the_manifest_lists_all_files_so_that_force_replaces_them(joined):
    assert list_names(joined.path) == {*joined.manifest.files, "manifest.json"}


def test_a_joined_bundle_can_be_moved_and_the_model_deleted(joined, model, tmp_path):
    expected = run(joined.plans[1], 8)
    moved = Path(shutil.copytree(joined.path, tmp_path / "elsewhere"))
    shutil.rmtree(joined.path)
    (model.parent / "model.weights").unlink()
    np.testing.assert_array_equal(run(Bundle.open(moved, "all").plans[1], 8), expected)


def test_parts_of_split_operators_are_found_in_whole_weights_where_they_are_contiguous(model):
    shard = {"layer[02]": "columns", "layer[13]": "sum"}
    sharded = compile_part(model, "sharded", shard_map=shard)
    assert sharded.manifest.sharding is not None
    bundle = join_plans([compile_part(model, "alone"), sharded], {}, SIZES)
    # Columns are written again, rows are not.
    written = (bundle.path / "segments/weights.bin").stat().st_size
    assert LAYERS * WEIGHT_BYTES < written <= (LAYERS + 2) * WEIGHT_BYTES + 8 * 4096
    assert onnxplace.verify(bundle.path / "plan1", sizes=1).equal


def test_plans_of_linked_bundles_link_to_the_same_file(model):
    bundles = [
        compile_part(model, name, link_weights=True, **options)
        for name, options in (("alone", {}), ("placed", {"device_map": {"layer[01]": "cpu:0", ".*": "cpu:1"}}))
    ]
    expected = run(bundles[1], 8)
    joined = join_plans(bundles, {}, SIZES)
    opened = Bundle.open(joined.path, "all")
    np.testing.assert_array_equal(run(opened.plans[1], 8), expected)
    assert (joined.path / "segments/weights.bin").stat().st_size == 0
    (model.parent / "model.weights").write_bytes(b"changed")
    with pytest.raises(BundleError, match="changed since the compile"):
        Bundle.open(joined.path / "plan1")


def test_states_with_initial_values_keep_them(tmp_path):
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> counter (float[n, 512] x, float[1, 512] past) => '
        "(float[n, 512] y, float[1, 512] present) "
        "{ y = Add(x, past)  one = ReduceMean<axes=[0]>(y)  present = Abs(one) }"
    )
    initial = np.arange(512, dtype=np.float32)[None]
    proto.graph.initializer.append(numpy_helper.from_array(initial, "past"))
    onnx.save(proto, tmp_path / "m.onnx")
    bundles = [
        onnxplace.compile(
            tmp_path / "m.onnx",
            tmp_path / device[-1],
            devices=device,
            shape={"n": 2},
            trial=False,
            state="present=past",
        )
        for device in ("cpu:0", "cpu:1")
    ]
    plan = Bundle.open(join_plans(bundles, {}, SIZES).path).plans[1]
    np.testing.assert_array_equal(plan.initial_states()["past"], initial)
    with onnxplace.InferenceSession(plan) as session:
        np.testing.assert_array_equal(session.run(None, {"x": np.zeros((2, 512), np.float32)})[0][0], initial[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "plan1/manifest.json").write_text("{}"), "expected .* bytes|SHA-256 differs"),
        (lambda folder: shutil.rmtree(folder / "plan1"), "missing"),
        (lambda folder: (folder / "segments/weights.bin").write_bytes(bytes(LAYERS * WEIGHT_BYTES)), "SHA-256 differs"),
    ],
    ids=["its manifest", "all of it", "its weights"],
)
def test_a_damaged_plan_is_refused(joined, damage, message):
    damage(joined.path)
    with pytest.raises(BundleError, match=message):
        Bundle.open(joined.path)


def test_a_plan_whose_weights_were_altered_is_refused_alone_too(joined):
    data = bytearray((joined.path / "segments/weights.bin").read_bytes())
    data[100] ^= 1
    (joined.path / "segments/weights.bin").write_bytes(data)
    with pytest.raises(BundleError, match="changed since the compile"):
        Bundle.open(joined.path / "plan1")


def test_compile_joins_what_it_compiled_for_each_size(model, run_cli, tmp_path):
    out = tmp_path / "b.bundle"
    sizes = ["--shape", "batch=1", "--shape", "batch=8=0.5"]
    assert run_cli("compile", model, "-o", out, "--devices", "cpu:0,cpu:1", *sizes).code == 0
    bundle = Bundle.open(out, "all")
    weighted = [item for item in bundle.manifest.sizes if item.weight]
    assert [(item.dimensions, item.weight) for item in weighted] == [({"batch": 1}, 1), ({"batch": 8}, 0.5)]
    assert all(len(item.seconds) == len(bundle.plans) for item in bundle.manifest.sizes)
    assert list_names(out) == {*json.loads((out / "manifest.json").read_text())["files"], "manifest.json"}
    ran = run_cli("compile", model, "-o", out, "--devices", "cpu:0", *sizes, "--plans", "1", "--force")
    assert ran.code == 0
    assert "one plan for 2 sizes" in ran.err
    assert not Bundle.open(out).manifest.plans


def test_sizes_and_inputs_exclude_each_other(model, run_cli, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((2, WIDTH), np.float32))
    ran = run_cli("compile", model, "--shape", "batch=1", "--shape", "batch=8", "--inputs", tmp_path / "x.npz")
    assert (ran.code, "U042" in ran.err, "--shape gives several" in ran.err) == (2, True, True)


@pytest.mark.parametrize(
    ("command", "options"), [("compile", ("--costs", "--save-costs")), ("plan", ("--costs",))], ids=str
)
def test_files_of_costs_are_for_one_size(model, run_cli, command, options):
    for option in options:
        ran = run_cli(command, model, "--shape", "batch=1", "--shape", "batch=8", option, "costs.json")
        assert ran.code == 2
        assert f"error[U042] --shape: there are 2 sizes, and {option} " in ran.err


@pytest.mark.parametrize("command", ["compile", "plan"])
def test_a_size_that_is_incomplete_is_named_before_work(run_cli, tmp_path, command):
    text = "two (float[n] x, float[m] z) => (float[n] y, float[m] w) { y = Neg(x) w = Neg(z) }"
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), tmp_path / "two.onnx")
    ran = run_cli(command, tmp_path / "two.onnx", "--shape", "n=1,m=2", "--shape", "n=7")
    assert ran.code == 2
    assert "error[M020] --shape n=7: symbolic dimensions without a value: m" in ran.err
    assert "size 1 of 2" not in ran.err


def test_an_error_names_its_size_and_leaves_nothing(run_cli, tmp_path):
    text = "sum (float[n] x, float[2] z) => (float[k] y) { y = Add(x, z) }"
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), tmp_path / "sum.onnx")
    sizes = ("--shape", "n=2", "--shape", "n=3", "--no-trial")
    ran = run_cli("compile", tmp_path / "sum.onnx", "-o", tmp_path / "b.bundle", "--devices", "cpu:0,cpu:1", *sizes)
    assert ran.code == 2
    assert "error[M017] --shape n=3: sum: " in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["sum.onnx"]


@pytest.mark.parametrize("method", ["write_text", "rename"])
def test_a_full_disk_while_plans_are_joined_is_reported_and_leaves_nothing(run_cli, model, monkeypatch, method):
    def join_on_full_disk(*arguments):
        def fail(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, method, fail)
            return join_plans(*arguments)

    monkeypatch.setattr(plan_sets, "join_plans", join_on_full_disk)
    monkeypatch.setattr(plan_sets, "rank_sets", lambda *_, **__: [plan_sets.PlanSet((0, 1), np.ones(2), 1.0, (0, 1))])
    monkeypatch.chdir(model.parent)
    before = list_names(model.parent)
    sizes = ("--shape", "batch=1", "--shape", "batch=9", "--fixed-sizes", "--no-trial")
    ran = run_cli("compile", model, "-o", "b.bundle", "--devices", "cpu:0,cpu:1", *sizes)
    assert ran.code == 4
    assert "error[E001] b.bundle: no space left" in ran.err
    assert list_names(model.parent) == before


def test_an_error_names_the_bundle_and_not_a_part_of_it(run_cli, model, monkeypatch):
    def fail(self, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.chdir(model.parent)
    sizes = ("--shape", "batch=1", "--shape", "batch=8", "--no-trial")
    ran = run_cli("compile", model, "-o", "b.bundle", "--devices", "cpu:0,cpu:1", *sizes)
    assert ran.code == 4
    assert "error[E001] --shape batch=1: b.bundle: no space left" in ran.err
