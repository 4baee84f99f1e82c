"""Measuring: every node gets its kernel, times add up, and the child process for GPUs works from any script."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import numpy_helper, parser

import models
from onnxplace.facts import Groups, Profile, Source
from onnxplace.machine import repeated_runs
from onnxplace.machine.hardware import local_target
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.repeated_runs import MIN_RUNS, RepeatPolicy, Runs, longest_wait, read_run_delays
from onnxplace.model.loading import load
from onnxplace.model.model import store_for_session
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.profiling import node_measurement
from onnxplace.passes.profiling.kernel_attribution import Attribution, attribute_kernels, remove_overhead
from onnxplace.passes.profiling.node_measurement import (
    MeasurementOptions,
    ProfilingJob,
    collect_kernels,
    profile,
    profile_blocking,
)
from onnxplace.passes.profiling.profile_model import report_unknown_sizes
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.device_kinds import DeviceAddress
from tests.support.simulated_machine import NOISES, SimulatedMachine


@pytest.fixture(scope="module")
def model():
    return load(models.build("squeezenet"))


def test_node_times_add_up_to_a_run_of_the_whole_model(model):
    measurement = MeasurementOptions(DeviceAddress("cpu", 0), (0,), 3, 0.5).measure(model, model.feeds())[0]
    assert measurement.seconds.sum() == pytest.approx(measurement.whole_seconds)
    assert (measurement.seconds >= 0).all()


def test_fused_nodes_are_one_unit_and_one_group(model):
    state = State(local_target("cpu:0,cpu:1")).with_facts(model)
    state, _ = Pipeline.parse("optimize,profile{repeat=3,seconds=0.5},coplace{join=never}").run(state)
    profile, groups = state[Profile], state[Groups]
    graph = profile.graph
    fused = [(graph.ops[p], graph.ops[n]) for n in range(len(graph)) for p in graph.predecessors[n]
             if profile.unit[p] == profile.unit[n]]  # fmt: skip
    assert ("Conv", "Relu") in fused
    for node in range(len(graph)):
        same = np.flatnonzero(profile.unit == profile.unit[node])
        assert len(set(groups.group[same].tolist())) == 1
    assert set(profile.sources["cpu/1"].tolist()) <= {Source.MEASURED, Source.KNOWN}


@pytest.mark.parametrize(
    ("thorough", "added", "series"), [(False, 0.0, 1), (False, 1.0, 2), (True, 0.0, 2)], ids=["heavy", "light", "all"]
)
def test_a_model_runs_again_without_the_profiler_only_where_that_adds_much(model, monkeypatch, thorough, added, series):
    made, actual = [], node_measurement.run_repeatedly
    monkeypatch.setattr(node_measurement, "run_repeatedly", lambda *args: made.append(actual(*args)) or made[-1])
    monkeypatch.setattr(node_measurement, "PROFILER_SECONDS", added)
    options = MeasurementOptions(DeviceAddress("cpu", 0), (0,), 3, 0.5, thorough=thorough)
    measurement, results = options.measure(model, model.feeds())
    assert len(made) == series
    assert measurement.whole_seconds == made[-1][0].seconds == pytest.approx(measurement.seconds.sum())
    assert results is made[-1][1]


def job_for(model, folder: Path) -> ProfilingJob:
    source, entries = store_for_session(model, folder)
    return ProfilingJob(
        source, entries, DeviceAddress("cpu", 0), (0,), model.feeds(), RepeatPolicy(3, 0.1, 0.02), str(folder), "model"
    )


def test_the_child_process_measures_the_same_kernels(model, tmp_path):
    local, child = profile(job_for(model, tmp_path))[0], profile_blocking(job_for(model, tmp_path))
    assert local.seconds.keys() == child.seconds.keys()
    assert local.output_bytes == child.output_bytes


def test_no_weights_are_written_while_a_model_is_measured(tmp_path, monkeypatch):
    """ONNX Runtime saves the graphs that it optimised; what it saves as weights is discarded."""
    text = "(float[1, 64, 8, 8] x) => (float[1, 64, 8, 8] y) { a = Conv <pads = [1, 1, 1, 1]> (x, w) y = Relu(a) }"
    weight = np.ones((64, 64, 3, 3), np.float32)
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    model, written = load(tmp_path / "model.onnx"), []

    def open_and_list(source, options, *arguments):
        session = open_session(source, options, *arguments)
        folder = Path(options.optimized_model_filepath).parent
        written.append(sum(path.stat().st_size for path in folder.iterdir()))
        return session

    monkeypatch.setattr(node_measurement, "open_session", open_and_list)
    measurement = MeasurementOptions(DeviceAddress("cpu", 0), (0,), 3, 0.1).measure(model, model.feeds())[0]
    assert measurement.ran.any()
    assert len(written) == 2
    assert 0 < max(written) < weight.nbytes / 2


def test_the_child_process_starts_from_a_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "import models\n"
        "from onnxplace.model import load\n"
        "from onnxplace.model.model import store_for_session\n"
        "from onnxplace.passes.profiling.node_measurement import ProfilingJob, profile_blocking\n"
        "from onnxplace.target.device_kinds import DeviceAddress\n"
        "from onnxplace.machine.repeated_runs import RepeatPolicy\n"
        "model = load(models.build('squeezenet'))\n"
        "source, entries = store_for_session(model, Path('.'))\n"
        "policy, device = RepeatPolicy(3, 0.1, 0.02), DeviceAddress('cpu', 0)\n"
        "job = ProfilingJob(source, entries, device, (0,), model.feeds(), policy, '.', 'model')\n"
        "print(len(profile_blocking(job).seconds))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert int(ran.stdout) > 10


# ---------------------------------------------------------------------------------------------- runs, waiting


def make_runs(elapsed, waiting) -> Runs:
    return Runs(np.array(elapsed, dtype=float), np.array(waiting, dtype=float))


def test_waiting_is_taken_off_and_undisturbed_runs_count():
    runs = make_runs([1.0, 1.01, 3.0, 0.99, 9.0], [0.0, 0.0, 1.9, 0.0, 8.0])
    assert runs.undisturbed.tolist() == [0, 1, 3]
    assert runs.seconds == 1.0
    assert runs.waiting == 0.0
    assert runs.spread == pytest.approx(0.01)


def test_if_all_runs_waited_the_less_disturbed_half_counts():
    runs = make_runs([2.0, 4.0, 3.0, 1.5, 8.0, 9.0], [1.0, 3.1, 1.9, 0.5, 7.0, 8.1])
    assert runs.undisturbed.tolist() == [0, 2, 3]
    assert runs.seconds == pytest.approx(1.0)
    assert runs.waiting == pytest.approx(3.4 / 6.5)


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.floats(0, 1)), min_size=1, max_size=30))
def test_corrected_times_are_between_zero_and_the_elapsed_time(samples):
    elapsed = [time for time, _ in samples]
    runs = make_runs(elapsed, [time * share for time, share in samples])
    assert 0 <= runs.seconds <= max(elapsed)
    assert 0 <= runs.waiting <= 1
    assert min(len(samples), 3) <= len(runs.computing_seconds) <= len(samples)
    assert runs.spread >= 0


def make_series(seconds, references) -> Runs:
    return Runs(np.array(seconds, dtype=float), np.zeros(len(seconds)), np.array(references, dtype=float))


@pytest.fixture
def reference(monkeypatch) -> list[float]:
    """Let this process know the least time of the reference loop: 50 us."""
    known = [50e-6] * repeated_runs.MIN_REFERENCES
    monkeypatch.setattr(repeated_runs, "_references", known)
    return known


def test_runs_on_a_slower_core_do_not_count(reference):
    runs = make_series([1.0, 1.9, 1.01, 1.8, 0.99, 1.7], [50e-6, 95e-6, 51e-6, 90e-6, 50e-6, 85e-6])
    assert runs.undisturbed.tolist() == [0, 2, 4]
    assert runs.seconds == 1.0
    assert runs.slowdown == 0.0


def test_a_series_that_drifts_is_uncertain_though_neighbours_agree(reference):
    steady, drifting = make_series([1.0] * 20, [50e-6] * 20), make_series([1.0] * 10 + [1.3] * 10, [50e-6] * 20)
    assert steady.uncertainty == 0.0
    assert drifting.uncertainty == pytest.approx(0.15 / 1.15)


def test_a_series_that_was_slow_from_end_to_end_is_uncertain_by_its_slowdown(reference):
    runs = make_series([1.3] * 20, [65e-6] * 20)
    assert runs.uncertainty == runs.slowdown == pytest.approx(0.3)


def test_a_policy_goes_on_while_the_halves_of_the_runs_contradict_each_other(monkeypatch):
    clock = Clock(monkeypatch, [0.10] * 2 + [0.13] * 1000)
    runs, _ = RepeatPolicy(1000, 60.0, 0.02).run(clock, pool=False)
    assert len(runs.elapsed_seconds) > 6
    assert runs.seconds == pytest.approx(0.13)


@given(st.lists(st.tuples(st.floats(1e-3, 10), st.floats(1e-5, 1e-3)), min_size=1, max_size=40))
def test_only_runs_next_to_a_fast_reference_count_where_they_suffice(samples):
    references = np.array([reference for _, reference in samples])
    kept = set(make_series(*zip(*samples)).undisturbed.tolist())
    ratios = references / references.min()
    fast, slow = (
        set(np.flatnonzero(ratios <= repeated_runs.MAX_SLOWDOWN).tolist()),
        set(np.flatnonzero(ratios > 1.12).tolist()),
    )
    if len(fast) >= MIN_RUNS:
        assert fast <= kept
        assert not slow & kept
    assert len(kept) >= min(MIN_RUNS, len(samples))


class Clock:
    """A clock that advances only during calls, by given times."""

    def __init__(self, monkeypatch, taken, waited=()):
        self.now, self.taken, self.waited, self.total, self.calls = 0.0, list(taken), list(waited), 0, 0
        monkeypatch.setattr(repeated_runs.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(repeated_runs, "read_run_delays", lambda pool: {"": self.total})
        monkeypatch.setattr(repeated_runs, "_references", [])

    def __call__(self):
        self.now += self.taken[min(self.calls, len(self.taken) - 1)]
        self.total += int(self.waited[min(self.calls, len(self.waited) - 1)] * 1e9) if self.waited else 0
        self.calls += 1
        return self.calls


def test_equal_runs_stop_early(monkeypatch):
    runs, last = RepeatPolicy(100, 60.0, 0.02).run(Clock(monkeypatch, [0.1]), pool=False)
    assert len(runs.elapsed_seconds) == last == 3


def test_different_runs_are_repeated_until_the_median_is_known(monkeypatch):
    runs, _ = RepeatPolicy(1000, 600.0, 0.02).run(Clock(monkeypatch, [0.1, 0.12, 0.14] * 1000), pool=False)
    assert 10 < len(runs.elapsed_seconds) < 1000
    assert runs.uncertainty <= 0.02


@pytest.mark.parametrize(("repeat", "seconds", "count"), [(7, 60.0, 7), (1, 60.0, 1), (1000, 1.0, 10), (1000, 0.0, 3)])
def test_repeating_ends_at_the_limit_of_runs_or_time(monkeypatch, repeat, seconds, count):
    clock = Clock(monkeypatch, [0.101, 0.09, 0.11] * 500)
    assert len(RepeatPolicy(repeat, seconds, 0.0).run(clock, pool=False)[0].elapsed_seconds) == count


def test_a_policy_ends_where_the_speed_keeps_drifting(monkeypatch):
    """More runs would not make the median surer."""
    levels = [0.01 * 1.5 ** (number // 10 % 2) * (1 + number % 3 / 100) for number in range(100_000)]
    runs, _ = RepeatPolicy(100_000, 600.0, 0.001).run(Clock(monkeypatch, levels), pool=False)
    assert runs.elapsed_seconds.sum() < 60.0
    assert runs.uncertainty > 0.05  # and says so


def test_a_policy_goes_on_where_more_runs_lower_the_error(monkeypatch):
    random = np.random.default_rng(0)
    times = 0.01 * (1 + 0.1 * random.random(100_000))
    runs, _ = RepeatPolicy(100_000, 600.0, 0.005).run(Clock(monkeypatch, times), pool=False)
    assert len(runs.elapsed_seconds) > 50
    assert runs.uncertainty <= 0.005


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(NOISES)), st.sampled_from([1e-3, 1e-2, 0.1, 0.3]))
def test_a_profile_ends_soon_whatever_the_noise_and_reports_what_it_doubts(seed, name, step):
    machine, options = SimulatedMachine(NOISES[name], seed), ProfileCosts()
    with machine.installed():
        runs, _ = RepeatPolicy(options.repeat, options.seconds, options.tolerance).run(lambda: machine.run(step), False)
    spent, longest = runs.elapsed_seconds.sum(), runs.elapsed_seconds.max()
    assert MIN_RUNS <= len(runs.elapsed_seconds) <= options.repeat
    assert spent <= max(options.seconds + options.repeat // 8 * longest, MIN_RUNS * longest)
    is_sure = runs.uncertainty <= options.tolerance
    is_spent = len(runs.elapsed_seconds) == options.repeat or spent >= options.seconds
    assert is_sure or is_spent or runs.drift > options.tolerance


def test_a_wait_longer_than_the_run_leaves_some_time(monkeypatch):
    runs, _ = RepeatPolicy(5, 60.0, 0.02).run(Clock(monkeypatch, [0.2], [0.7]), pool=False)
    assert runs.computing_seconds.min() > 0
    assert runs.seconds == pytest.approx(0.02)


def test_on_a_busy_machine_the_wait_is_subtracted(monkeypatch):
    runs, _ = RepeatPolicy(1000, 60.0, 0.02).run(Clock(monkeypatch, [0.2], [0.1]), pool=False)
    assert runs.waiting == pytest.approx(0.5)
    assert runs.seconds == pytest.approx(0.1)


def test_several_threads_waited_as_long_as_the_longest_wait():
    assert longest_wait({"1": 10, "2": 5}, {"1": 20, "2": 2_000_000_005, "3": 7}) == pytest.approx(2.0)
    assert longest_wait({}, {}) == 0.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="only Linux reports delays")
def test_linux_reports_delays_of_one_thread_and_of_all():
    assert set(read_run_delays(pool=False)) == {""}
    assert len(read_run_delays(pool=True)) >= 1


# ---------------------------------------------------------------------------------------------- kernels to nodes


def test_the_overhead_of_the_profiler_is_taken_off_each_kernel():
    seconds, added = remove_overhead(np.array([10e-6, 4e-6, 4e-6, 2e-6]), 12e-6)
    assert added == pytest.approx(2.066e-6, rel=1e-2)  # the smallest kernel keeps a tenth
    assert seconds.tolist() == pytest.approx([7.93e-6, 1.93e-6, 1.93e-6, 0.2e-6], rel=1e-2)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.floats(1e-6, 10))
def test_kernel_times_add_up_to_the_run_without_the_profiler(microseconds, whole):
    seconds = [count * 1e-6 for count in microseconds]
    corrected, added = remove_overhead(np.array(seconds), whole)
    assert 0 <= added <= 5e-6
    assert (corrected >= 0).all()
    assert corrected.sum() == pytest.approx(whole if sum(seconds) else 0.0, rel=1e-6)
    assert (np.diff(corrected[np.argsort(seconds, kind="stable")]) >= -1e-9 * whole).all()


def kernel_event(name: str, ts: int, dur: int, shape=((2, 3),)) -> dict:
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur,
            "args": {"output_type_shape": [{"float": list(dims)} for dims in shape]}}  # fmt: skip


def run_event(ts: int, dur: int) -> dict:
    return {"cat": "Session", "name": "model_run", "ts": ts, "dur": dur}


def test_kernels_of_disturbed_and_warm_up_runs_do_not_count():
    events = [run_event(0, 100), kernel_event("k", 10, 90)]  # warm-up
    for number in range(1, 6):
        events += [
            run_event(100 * number, 50),
            kernel_event("k", 100 * number + 1, 900 if number == 3 else 10 + number),
        ]
    kernels = collect_kernels(events, make_runs([1.0] * 5, [0, 0, 0.9, 0, 0]))
    assert kernels.seconds["k"] == pytest.approx(np.mean([12, 14]) * 1e-6)
    assert kernels.output_bytes == {"k": [24]}


def program_event(name: str, microseconds: int) -> dict[str, object]:
    return {"cat": "Api", "name": name, "ts": 7, "dur": microseconds, "args": {"shapes": ""}}


def test_times_on_the_device_replace_those_of_launches():
    events = [event for number in range(4) for event in (run_event(100 * number, 50), kernel_event("a&b", 1, 3))]
    events += [kernel_event("host", 100 * number + 1, 8) for number in range(4)]
    for number in range(4):  # two programs; the first run is a warm-up, the third one waited for a core
        events += [
            program_event("a&b&Conv&Transpose", 10),
            program_event("a&b&Conv&Conv2d", [900, 40, 700, 60][number]),
        ]
    kernels = collect_kernels(events, make_runs([1.0] * 3, [0, 0.9, 0]))
    assert kernels.seconds == pytest.approx({"a&b": 60e-6, "host": 8e-6})


def test_programs_whose_number_differs_between_runs_do_not_count():
    events = [
        event for number in range(2) for event in (run_event(9 * number, 5), kernel_event("k", 9 * number + 1, 3))
    ]
    events += [program_event("k&Loop&Neg", 50)] * 3
    assert collect_kernels(events, make_runs([1.0] * 2, [0, 0])).seconds["k"] == pytest.approx(3e-6)


def test_outputs_that_are_no_tensor_have_no_size():
    odd = {"cat": "Node", "name": "k_kernel_time", "ts": 1, "dur": 1, "args": {"output_type_shape": [{"string": [2]}]}}
    assert collect_kernels([run_event(0, 9), odd], make_runs([1.0], [0.0])).output_bytes == {"k": [-1]}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("float", 24), ("double", 48), ("complex64", 48), ("int64", 48), ("bool", 6)),
        *(("bfloat16", 12), ("Float8E4M3FN", 6), ("Float8E5M2FNUZ", 6), ("Int4x2", 3), ("UInt4x2", 3), ("UInt2x4", 2)),
    ],
)
def test_the_bytes_of_an_output_follow_from_its_type(kind, size):
    event = {"cat": "Node", "name": "k_kernel_time", "ts": 1, "dur": 1, "args": {"output_type_shape": [{kind: [2, 3]}]}}
    assert collect_kernels([run_event(0, 9), event], make_runs([1.0], [0.0])).output_bytes == {"k": [size]}


NAMED_TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, 8] x, float[1, 8] z) => (float[1, 8] y, float[1, 8] u)
{ [conv] a = Relu(x)  [other] b = Tanh(z)  [add] c = Add(a, b)  [relu] y = Sigmoid(c)  [end] u = Neg(y) }"""


def attribute_to(ran: str) -> Attribution:
    model = load(parser.parse_model(NAMED_TEXT))
    fused = parser.parse_model(NAMED_TEXT)
    head = '<ir_version: 8, opset_import: ["": 17, "l": 1]> g (float[1, 8] x, float[1, 8] z) => (float[1, 8] y) '
    return attribute_kernels(model, fused, parser.parse_model(head + ran))


def test_kernels_are_located_by_values_and_names():
    attribution = attribute_to("""{ [a_nchwc] t1 = l.Relu(x)  [other_token_7] t2 = l.Tanh(z)
        [add] t3 = l.Add(t1, t2)
        [c_nchwc_token_3] t4 = l.Sigmoid(t3)  [ReorderOutput] y = l.ReorderOutput(t4)  [end] u = Neg(y) }""")
    conv, other, add, relu, end = attribution.unit.tolist()
    assert attribution.kernel.tolist() == [conv, other, add, add, relu, end]
    assert len({conv, other, add, relu, end}) == 5
    assert attribution.ran.all()


def test_a_node_without_a_kernel_joins_the_kernel_that_computes_it():
    attribution = attribute_to("""{ [b_nchwc] t2 = l.Tanh(z)  [a_nchwc] t1 = l.Conv(x, t2)
        [ReorderOutput] t3 = l.ReorderOutput(t1)  [end] u = Neg(t3) }""")
    conv, other, add, relu, end = attribution.unit.tolist()
    assert conv == add == relu
    assert len({conv, other, end}) == 3


def test_units_stay_apart_if_a_kernel_cannot_be_located():
    attribution = attribute_to("{ [riddle] t1 = l.Everything(x, z)  [end] u = Neg(t1) }")
    assert len(set(attribution.unit.tolist())) == 5
    assert attribution.kernel.tolist() == [attribution.unit[4], attribution.unit[4]]


def test_nodes_of_a_unit_share_its_time():
    attribution = Attribution(
        np.array([0, 1, -1], dtype=np.int32), np.array([0, 1, 1, 1], dtype=np.int32), np.ones(4, bool)
    )
    assert attribution.per_node(np.array([1.0, 6.0, 9.0])).tolist() == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_nodes_of_convolutional_networks_get_all_kernel_time(name):
    model = load(models.build(name))
    measurement = MeasurementOptions(DeviceAddress("cpu", 0), (0,), 3, 0.1).measure(model, model.feeds())[0]
    assert measurement.seconds.sum() == pytest.approx(measurement.whole_seconds)
    ops = [node.op_type for node in model.nodes]
    convolution_units = np.unique([measurement.unit[index] for index, op in enumerate(ops) if op == "Conv"])
    convolution_seconds = measurement.seconds[np.isin(measurement.unit, convolution_units)].sum()
    assert convolution_seconds > 0.4 * measurement.whole_seconds
    quality = measurement.quality
    assert quality.kernels > 20
    assert quality.overhead_seconds <= 5e-6
    assert (measurement.spread >= 0).all()


@pytest.mark.parametrize(("unit", "named"), [([0, 1, 2], ["a", "b"]), ([0, 0, 1], ["b"]), ([0, 0, 0], [])])
def test_only_values_that_leave_their_unit_need_a_size(unit, named):
    text = "g (float[2] x) => (float[2] y) { a = Relu(x) b = Neg(a) y = Abs(b) }"
    model = load(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'))
    notes = report_unknown_sizes(model, {"x": 8, "y": 8}, np.array(unit, dtype=np.int32))
    assert [name for name in ("a", "b") if any(repr(name) in note.message for note in notes)] == named[:1]
    assert [str(len(named)) in note.message for note in notes] == [True] * bool(named)
