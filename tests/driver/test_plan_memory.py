"""What several plans of a bundle hold together: predicted, compared with limits, and measured."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, numpy_helper, save

import onnxplace
from onnxplace.bundle.manifest import HOST, DeviceRecord, SizeRecord
from onnxplace.driver.join_plans import join_plans
from onnxplace.driver.plan_memory import PlanMemory, fits_together, hold_on, hold_together
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.memory_use import can_measure_memory, measure_memory
from onnxplace.measure.trial import count_process_bytes
from onnxplace.reports.text import compile_summary
from onnxplace.target.target import Device, Pool, Target

MIB = 1 << 20
ROWS, WIDTH = 2048, 1024


def make_plan(memory, *devices, mapped=None, pools=()):
    """Return a plan that holds (weights, values) on each of some devices."""
    records = [
        DeviceRecord(
            id=name, nodes=1, compute_seconds=0, weights_bytes=weights, peak_bytes=weights + values, limit_bytes=0
        )
        for name, (weights, values) in memory.items()
    ]
    return PlanMemory(records, Target(devices, pools=tuple(pools)), mapped or {})


def spanning(name, memory, *processors):
    return Device(name, memory, cores=max(len(processors), 1), processors=processors)


FIRST, SECOND, BOTH = (spanning("cpu:0", 100), spanning("cpu:1", 100), spanning("cpu:0-1", 200, "cpu:0", "cpu:1"))


def test_weights_add_up_and_values_are_those_of_one_plan():
    plans = [make_plan({"cpu:0": (30, 5), "cpu:1": (10, 2)}, FIRST, SECOND), make_plan({"cpu:0": (30, 9)}, FIRST)]
    held = hold_together(plans)
    assert (held["cpu:0"].weights_bytes, held["cpu:0"].peak_bytes, held["cpu:0"].shared_bytes) == (60, 69, 0)
    assert (held["cpu:1"].weights_bytes, held["cpu:1"].peak_bytes) == (10, 12)
    assert held[HOST].peak_bytes == 60 + 10 + 9


def test_weights_that_are_read_in_place_count_once_on_a_device_and_in_a_process():
    table = (20, b"table")
    plans = [
        make_plan({"cpu:0": (30, 0)}, FIRST, mapped={"cpu:0": {table, (5, b"one")}}),
        make_plan({"cpu:0": (25, 0), "cpu:1": (20, 0)}, FIRST, SECOND, mapped={"cpu:0": {table}, "cpu:1": {table}}),
    ]
    held = hold_together(plans)
    assert (held["cpu:0"].weights_bytes, held["cpu:0"].shared_bytes) == (35, 20)
    assert held["cpu:1"].weights_bytes == 20
    assert (held[HOST].weights_bytes, held[HOST].shared_bytes) == (35, 40)


def test_gpus_are_not_part_of_the_process():
    gpu = Device("cuda:0", 100, model="G")
    held = hold_together([make_plan({"cpu:0": (1, 0), "cuda:0": (50, 0)}, FIRST, gpu)] * 2)
    assert held["cuda:0"].weights_bytes == 100
    assert held[HOST].weights_bytes == 2


@pytest.mark.parametrize(("on_span", "fits"), [(120, True), (121, False)])
def test_a_device_that_spans_processors_has_their_memory(on_span, fits):
    """The limit of `cpu:0-1` is the sum of the two others, and what these hold leaves less for it."""
    devices = make_plan({"cpu:0": (50, 0), "cpu:1": (30, 0)}, FIRST, SECOND)
    assert fits_together([devices, make_plan({"cpu:0-1": (on_span, 0)}, BOTH)]) is fits


def test_a_device_next_to_a_span_leaves_the_memory_of_other_processors():
    alone = make_plan({"cpu:0": (90, 0)}, FIRST)
    assert fits_together([alone, make_plan({"cpu:0-1": (110, 0)}, BOTH)])
    assert not fits_together([alone, make_plan({"cpu:0-1": (111, 0)}, BOTH)])
    assert not fits_together([make_plan({"cpu:0": (101, 0)}, FIRST), make_plan({"cpu:0-1": (1, 0)}, BOTH)])


def test_processors_of_two_spans_share_memory_by_way_of_a_third_device():
    chain = [spanning("cpu:0-1", 200, "cpu:0", "cpu:1"), spanning("cpu:1-2", 200, "cpu:1", "cpu:2")]
    full, rest = make_plan({"cpu:0-1": (200, 0)}, chain[0]), make_plan({"cpu:1-2": (100, 0)}, chain[1])
    assert fits_together([full, rest])
    assert not fits_together([full, make_plan({"cpu:1-2": (101, 0)}, chain[1])])
    assert fits_together([full, make_plan({"cpu:3": (100, 0)}, spanning("cpu:3", 100))])


def test_a_pool_holds_what_is_on_its_devices_and_on_their_processors():
    npu = Device("cuda:0", 100, model="G")
    pool = Pool(("cpu:0", "cuda:0"), 120)
    pooled = make_plan({"cpu:0": (20, 0), "cuda:0": (60, 0)}, FIRST, npu, pools=[pool])
    assert fits_together([pooled, make_plan({"cpu:0": (40, 0)}, FIRST)])
    assert not fits_together([pooled, make_plan({"cpu:0": (41, 0)}, FIRST)])
    assert not fits_together([pooled, make_plan({"cpu:0-1": (41, 0)}, BOTH)])
    assert fits_together([pooled, make_plan({"cpu:1": (100, 0)}, SECOND)])


@pytest.mark.parametrize(
    ("values", "fits", "overlap"), [(30, True, True), (31, True, False), (80, True, False), (81, False, False)]
)
def test_devices_of_one_processor_have_room_for_the_values_of_one_plan_or_of_all(values, fits, overlap):
    """`cpu:0` and `cpu:0-1` have 200 bytes together, of which weights take 120, and values of the first plan 50."""
    plans = [make_plan({"cpu:0": (40, 50)}, FIRST), make_plan({"cpu:0-1": (80, values)}, SECOND, BOTH)]
    assert (fits_together(plans), fits_together(plans, sum)) == (fits, overlap)


def test_plans_of_a_pool_have_room_for_the_values_of_one_or_of_all():
    npu = Device("cuda:0", 100, model="G")
    pool = Pool(("cpu:0", "cuda:0"), 100)
    plans = [make_plan({name: (20, 50)}, FIRST, npu, pools=[pool]) for name in ("cpu:0", "cuda:0")]
    assert (fits_together(plans), fits_together(plans, sum)) == (True, False)
    assert (hold_on(pool.devices, plans).peak_bytes, hold_on(pool.devices, plans, sum).peak_bytes) == (90, 140)


SIZES = st.integers(0, 120)


@st.composite
def plan_lists(draw):
    devices = [FIRST, SECOND, BOTH, spanning("cpu:2", 100)]
    plans = []
    for _ in range(draw(st.integers(1, 4))):
        used = draw(st.lists(st.sampled_from(devices), min_size=1, max_size=3, unique_by=lambda item: item.id))
        mapped = {item.id: draw(st.sets(st.sampled_from([(3, b"a"), (4, b"b"), (5, b"c")]))) for item in used}
        # A device holds at least the weights that are read in place.
        memory = {name: (sum(size for size, _ in keys) + draw(SIZES), draw(SIZES)) for name, keys in mapped.items()}
        plans.append(make_plan(memory, *used, mapped=mapped))
    return plans


@given(plan_lists(), st.data())
def test_fewer_plans_hold_no_more_and_fit_if_all_do(plans, data):
    kept = data.draw(st.lists(st.sampled_from(range(len(plans))), min_size=1, unique=True))
    part, whole = [plans[index] for index in sorted(kept)], hold_together(plans)
    for name, item in hold_together(part).items():
        assert item.weights_bytes <= whole[name].weights_bytes
        assert item.peak_bytes <= whole[name].peak_bytes
    assert fits_together(part) or not fits_together(plans)


@given(plan_lists())
def test_plans_hold_at_least_what_each_does_and_at_most_the_sum(plans):
    for name, item in hold_together(plans).items():
        if name != HOST:
            own = [
                (record.weights_bytes, record.peak_bytes)
                for plan in plans
                for record in plan.devices
                if record.id == name
            ]
            assert max(weights for weights, _ in own) <= item.weights_bytes <= sum(weights for weights, _ in own)
            assert max(peak for _, peak in own) <= item.peak_bytes <= sum(peak for _, peak in own)
            assert item.weights_bytes + item.shared_bytes == sum(weights for weights, _ in own)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A table of 8 MiB, which is read where it lies, and two products with 4 MiB each, which are packed."""
    table, *matrices = (np.random.default_rng(seed).random((ROWS, WIDTH), np.float32) / 1000 for seed in range(3))
    one, ends = np.array([1], np.int64), np.array([0], np.int64)
    weights = {"table": table, "w0": matrices[0][:WIDTH], "w1": matrices[1][:WIDTH], "one": one, "zero": ends}
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"], start=0, end=1),
        helper.make_node("Slice", ["table", "zero", "sizes", "zero", "one"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["sum"]),
        helper.make_node("MatMul", ["sum", "w0"], ["product"]),
        helper.make_node("MatMul", ["product", "w1"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH])] for name in ("x", "y")]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "tables", *ends, tensors)
    path = tmp_path_factory.mktemp("tables") / "m.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def bundle(model_file):
    """A plan for few rows on one device, and one for many rows on two."""
    steps = "optimize,profile{estimate=true},%s,split,emit"
    compiled = [
        onnxplace.compile(
            model_file,
            model_file.with_name(f"{placer}.bundle"),
            shape={"rows": rows},
            devices="cpu:0,cpu:1",
            pipeline=steps % placer,
            trial=False,
        )
        for placer, rows in (("single", 8), ("m-topo", ROWS))
    ]
    sizes = [SizeRecord(dimensions={"rows": rows}, seconds=(rows, 1000), weight=1) for rows in (8, ROWS)]
    return join_plans(compiled, {"held": hold_together([PlanMemory.of(item) for item in compiled])}, sizes)


def test_a_table_of_two_plans_counts_once_and_packed_weights_twice(bundle):
    held = bundle.manifest.held
    assert list(held) == ["cpu:0", "cpu:1", HOST]
    assert held[HOST].shared_bytes == pytest.approx(8 * MIB, rel=0.01)
    assert held[HOST].weights_bytes == pytest.approx((8 + 4 * 4) * MIB, rel=0.01)
    values = max(sum(item.peak_bytes - item.weights_bytes for item in plan.manifest.devices) for plan in bundle.plans)
    assert held[HOST].peak_bytes - held[HOST].weights_bytes == values


def test_the_summary_of_several_plans_says_what_they_hold(bundle):
    rows = [line.split() for line in compile_summary(bundle).splitlines()]
    header = rows.index(["all", "plans", "weights", "shared", "peak"])
    assert [row[0] for row in rows[header + 1 : header + 4]] == ["cpu:0", "cpu:1", "host"]
    assert rows[header + 3][1:5] == ["24.0", "MiB", "8.0", "MiB"]
    alone = replace(bundle, manifest=bundle.manifest.model_copy(update={"held": {}}))
    assert "all plans" not in compile_summary(alone)


@pytest.mark.skipif(not can_measure_memory(), reason="only Linux tells the most a process held")
def test_a_process_with_all_plans_holds_what_is_predicted(bundle):
    plan = bundle.plans[1]
    feeds = random_feeds(plan.inputs, plan.manifest.dimensions)
    memory = measure_memory(plan, feeds, around=bundle)
    assert memory.all_plans_bytes == pytest.approx(count_process_bytes(bundle.manifest), rel=0.1)
    assert memory.all_plans_bytes > memory.process.running_bytes + 5 * MIB, "weights that the first plan packed"
    assert measure_memory(plan, feeds).all_plans_bytes is None


@pytest.mark.skipif(not can_measure_memory(), reason="only Linux tells the most a process held")
def test_bench_compares_the_memory_of_all_plans(bundle, run_cli):
    result = run_cli("bench", bundle.path, "--repeat", 2)
    (row,) = [line.split() for line in result.out.splitlines() if line.startswith("process, all plans")]
    assert row[3:5] == ["-", "-"]
    assert row[6::2] == ["MiB", "MiB"]
    assert float(row[5]) == pytest.approx(float(row[7]), rel=0.1)


@pytest.mark.parametrize(("spare", "overlap"), [(0, False), (1, True)])
def test_compile_says_whether_requests_of_different_plans_may_overlap(spare, overlap, model_file, tmp_path):
    """The processors have room for the weights of both plans and the values of the larger one, or also of the other."""
    options = {"shape": [{"rows": 1}, {"rows": ROWS}], "fixed_sizes": True, "placer": "single", "effort": "low"}
    options |= {"devices": "cpu:0,cpu:0-1", "trial": False, "force": True}
    planned = onnxplace.compile(model_file, tmp_path / "b", **options)
    used = [(item, plan) for plan in planned.plans for item in plan.manifest.devices if item.nodes]
    assert [item.id for item, _ in used] == ["cpu:0", "cpu:0-1"]
    weights = planned.manifest.held[HOST].weights_bytes
    small, large = (item.peak_bytes - item.weights_bytes for item, _ in used)
    limit = weights + large + spare * small
    limited = onnxplace.compile(model_file, tmp_path / "b", max_memory=f"cpu:0={limit // 2},cpu:0-1={limit}", **options)
    assert [item.id for plan in limited.plans for item in plan.manifest.devices if item.nodes] == ["cpu:0", "cpu:0-1"]
    assert limited.manifest.plans_overlap is overlap


@pytest.mark.parametrize("options", [(), ("--link-weights",)])
def test_compile_says_in_json_what_all_plans_hold(options, model_file, run_cli, tmp_path):
    """Each of these plans takes its own size only; linked weights are known by their place in the model's file."""
    model = onnx.load(model_file)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    shapes = ("--shape", "rows=8", "--shape", "rows=16", "--fixed-sizes", "--no-trial", "--placer", "single", *options)
    result = run_cli("compile", tmp_path / "m.onnx", "-o", tmp_path / "b", "--devices", "cpu:0", *shapes, "--json")
    held = json.loads(result.out)["held"]
    assert held["host"]["shared_bytes"] == pytest.approx(8 * MIB, rel=0.01)
    assert set(held) == {"cpu:0", "host"}
