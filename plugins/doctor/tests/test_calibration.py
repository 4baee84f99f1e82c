"""Calibration: samples on a busy machine, probe bundles, and the measured target."""

import sys
import types
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.bundle.manifest_checks import check_programs
from onnxplace.errors import TargetError, UsageError
from onnxplace.machine.hardware import find_link_technology
from onnxplace.pipeline.registry import find_plugin
from onnxplace.runtime.interface import Event, Result, RuntimeSession
from onnxplace.target.target import Device, Link, Shared, Target
from onnxplace.target.target_file import format_target, read_target
from onnxplace_doctor import calibrator
from onnxplace_doctor.calibrator import (
    TRANSFER_SIZES_BYTES,
    _build_target,
    _choose_sizes,
    _describe_sharing,
    _fit_links,
    _list_cpus,
    _list_notes,
    calibrate,
)
from onnxplace_doctor.microbenchmarks import (
    CallCosts,
    Contention,
    HopSamples,
    Slowdown,
    _make_hop_task,
)
from onnxplace_doctor.probe_runs import (
    LOWER_QUARTILE,
    MEDIAN,
    Probe,
    RequestTimes,
    Samples,
    read_waited_seconds,
    run_once,
    take_turns,
    write_probe_bundle,
)

TWO = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
DIRECTIONS = ("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")


def compute_times(latency: float, bandwidth: float) -> np.ndarray:
    return latency + np.array(TRANSFER_SIZES_BYTES) / bandwidth


# ---------------------------------------------------------------------------------------------- samples


def test_the_median_leaves_out_samples_that_waited_for_a_core():
    samples = Samples()
    samples.add([1.0, 2.0, 9.0], 0.01)
    samples.add([0.1, 50.0], 0.4)
    assert samples.undisturbed_count == 3
    assert samples.estimate(MEDIAN) == 2.0


def test_the_shortest_sample_counts_if_nearly_all_waited():
    samples = Samples([5.0, 4.0, 6.0], [0.9, 0.2, 0.0])
    assert samples.estimate(MEDIAN) == 4.0


def test_the_lower_quartile_of_undisturbed_samples_counts():
    samples = Samples([4.0, 1.0, 5.0, 2.0, 3.0], [0.0] * 5)
    assert samples.estimate(LOWER_QUARTILE) == 2.0
    samples.add([0.1] * 9, 0.5)
    assert samples.estimate(LOWER_QUARTILE) == 2.0
    assert Samples([5.0, 4.0, 6.0], [0.9, 0.2, 0.0]).estimate(LOWER_QUARTILE) == 4.0


@given(st.floats(0, 0.7), st.floats(1.1, 3), st.randoms(use_true_random=False))
def test_a_machine_that_is_slow_most_of_the_time_does_not_change_the_estimate(share, slower, random):
    slow = int(100 * share)
    seconds = [random.uniform(1.0, 1.05) * (slower if index < slow else 1.0) for index in range(100)]
    assert 1.0 <= Samples(seconds, [0.0] * 100).estimate(LOWER_QUARTILE) <= 1.05


def test_waited_seconds_never_decrease():
    before = read_waited_seconds()
    sum(range(10_000))
    assert 0 <= before <= read_waited_seconds()


def test_turns_are_round_robin_first_and_then_go_to_the_task_with_the_least_time(monkeypatch):
    now, names = [0.0], []
    monkeypatch.setattr("onnxplace_doctor.probe_runs.time.perf_counter", lambda: now[0])

    def make_task(name, seconds):
        def task():
            names.append(name)
            now[0] += seconds

        return task

    take_turns([make_task("a", 1.0), make_task("b", 4.0)], seconds=20.0, min_runs=2)
    assert names == ["a", "b"] * 2 + ["a"] * 7 + ["b"]
    assert now[0] == 21.0


def test_without_time_each_task_runs_the_minimum_number_of_times():
    names = []
    take_turns([lambda: names.append("a"), lambda: names.append("b")], seconds=0, min_runs=2)
    assert names == ["a", "b"] * 2


def test_runs_are_selected():
    events = (
        Event("cpu:0", "run", "0", 0.0, 1.0),
        Event("cpu:1", "run", "1", 2.0, 5.0),
        Event("cpu:1", "copy", "v", 1, 2),
    )
    times = RequestTimes(events, 0.0)
    assert times.list_run_seconds() == [1.0, 3.0]
    assert set(times.get_runs()) == {"0", "1"}


# ---------------------------------------------------------------------------------------------- probes


def test_probe_bundles_pass_values_between_devices_like_any_bundle(tmp_path):
    probes = [Probe(f"cpu:{i % 2}", f"v{i + 1} = Identity(v{i})", (f"v{i}",), (f"v{i + 1}",)) for i in range(4)]
    bundle = write_probe_bundle(tmp_path, TWO, probes)
    check_programs(bundle.manifest, tmp_path)
    with find_plugin("runtimes", "onnxruntime")().open(bundle, trace=True) as session:
        times = run_once(session, {"v0": np.ones(3, np.float32)})
    assert [event.name for event in times.events if event.kind == "run"] == ["0", "1", "2", "3"]
    assert {event.name for event in times.events if event.kind == "copy"} == {"v1", "v2", "v3"}
    starts, ends = ([getattr(e, f"{end}_seconds") for e in times.get_runs().values()] for end in ("start", "finish"))
    assert all(end <= start for end, start in zip(ends, starts[1:]))


class Replayed(RuntimeSession):
    """A session that returns the same events for each request."""

    def __init__(self, events):
        self._events = tuple(events)

    def submit(self, feeds, states=()):
        future = Future()
        future.set_result(Result({}, self._events, 1.0))
        return future

    def close(self):
        pass


def test_hops_are_sampled_by_direction_without_the_first_ones():
    events, now = [], 0.0
    for index, gap in enumerate([0.0, 50.0, 60.0, 1.0, 2.0, 3.0, 4.0]):
        start = now + gap
        now = start + 10 + index
        events.append(Event(f"cpu:{index % 2}", "run", str(index), start, now))
    hops = {direction: HopSamples() for direction in DIRECTIONS}
    task = _make_hop_task(Replayed(events), 1, 6, hops)
    for _ in range(3):
        task()
    assert hops[DIRECTIONS[0]].by_size[1].seconds == [2.0] * 3  # the middle of 1 and 3, without 50
    assert hops[DIRECTIONS[1]].by_size[1].seconds == [3.0] * 3
    assert hops[DIRECTIONS[0]].woken_runs.seconds == [14.0] * 3


def test_calls_and_contention_are_measured_alongside_every_pair(monkeypatch):
    rounds, notifications = [], []

    def record_round(tasks, seconds, min_runs):
        rounds.append((len(tasks), seconds))
        take_turns(tasks, 0, 1)

    monkeypatch.setattr(calibrator, "take_turns", record_round)
    three = Target((*TWO.devices, Device("cpu:2", 1 << 30)))
    calibration = calibrate(
        three, sizes=[1, 1 << 17], seconds=6.0, observer=lambda *arguments: notifications.append(arguments)
    )
    # Five kinds of calls per device; three kinds of work, on each device alone and on all; two sizes.
    assert rounds == [(3 * 5 + 3 * 4 + 2, 2.0)] * 3
    assert notifications == [("cpu:0 <-> cpu:1", 0, 3), ("cpu:0 <-> cpu:2", 1, 3), ("cpu:1 <-> cpu:2", 2, 3)]
    assert len(calibration.links) == 6
    assert all(link.undisturbed_samples.keys() == {1, 1 << 17} for link in calibration.links)


def test_sizes_are_evenly_spaced_on_a_logarithmic_scale():
    assert (TRANSFER_SIZES_BYTES[0], TRANSFER_SIZES_BYTES[-1]) == (1, 256 << 20)
    assert {after / before for before, after in pairwise(TRANSFER_SIZES_BYTES)} == {4.0}


# ---------------------------------------------------------------------------------------------- results


def make_hops(latency: float, bandwidth: float) -> HopSamples:
    hops = HopSamples(
        {
            size: Samples([time] * 3, [0.0] * 3)
            for size, time in zip(TRANSFER_SIZES_BYTES, compute_times(latency, bandwidth))
        }
    )
    hops.woken_runs.add([3e-5] * 3, 0.0)
    return hops


CALLS = {name: CallCosts(4e-6, 1e-6, 2e-6, copied_seconds=1e-5) for name in ("cpu:0", "cpu:1")}


def test_similar_directions_are_fitted_as_one_with_waking_in_the_latency():
    links = _fit_links({DIRECTIONS[0]: make_hops(5e-5, 5e9), DIRECTIONS[1]: make_hops(6e-5, 4.5e9)}, TWO.devices, CALLS)
    assert [(item.link.source, item.link.destination) for item in links] == list(DIRECTIONS)
    assert all(item.symmetric for item in links)
    assert links[0].fit == links[1].fit
    assert 7e-5 < links[0].link.latency_seconds < 8e-5
    assert 4.5e9 <= links[0].link.bytes_per_second <= 5e9


def test_different_directions_are_fitted_separately():
    links = _fit_links({DIRECTIONS[0]: make_hops(5e-5, 5e9), DIRECTIONS[1]: make_hops(5e-5, 1e9)}, TWO.devices, CALLS)
    assert not any(item.symmetric for item in links)
    assert [round(item.link.bytes_per_second / 1e9, 3) for item in links] == [5.0, 1.0]


def make_contention(memory: float, compute: float, copy: float) -> Contention:
    return Contention(*(Slowdown(factor, 40, 2e-3) for factor in (memory, compute, copy)))


def test_sharing_is_recorded_if_it_exceeds_noise():
    assert _describe_sharing(("cpu:0", "cpu:1"), None) == ()
    assert _describe_sharing(("cpu:0", "cpu:1"), make_contention(1.02, 1.04, 1.5)) == ()
    (entry,) = _describe_sharing(("cpu:0", "cpu:1"), make_contention(1.4, 1.0, 1.1))
    assert (entry.memory_slowdown, entry.compute_slowdown) == (1.4, 1.0)
    assert entry.memory_bytes_per_second == pytest.approx(4 * 4096**2 / 2e-3)


def test_contention_without_enough_samples_is_noted():
    contention = Contention(Slowdown(1.0, 2, 2e-3), Slowdown(1.0, 40, 2e-3), Slowdown(1.0, 0, 2e-3))
    (note,) = _list_notes([], contention)
    assert "memory, copy" in note
    assert _list_notes([], make_contention(1.0, 1.0, 1.0)) == ()


@pytest.mark.parametrize(("copy", "model"), [(1.1, "duplex"), (1.7, "duplex"), (1.9, "sequential")])
def test_copies_that_delay_each_other_share_one_channel(copy, model):
    assert _build_target(TWO, [], CALLS, make_contention(1.1, 1.0, copy)).link_model == model


def test_sizes_that_do_not_fit_into_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(calibrator, "available_memory_bytes", lambda: 1 << 20)
    assert _choose_sizes([1 << 17, 1, 1 << 18, 1]) == (1, 1 << 17)
    assert _choose_sizes([1 << 30]) == (1 << 30,)


@pytest.mark.parametrize("sizes", [[], [0], [-1, 5]])
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(UsageError, match=r"U005"):
        calibrate(TWO, sizes=sizes)


def test_a_missing_gpu_is_reported_before_any_measurement():
    with pytest.raises(TargetError, match=r"cuda:99"):
        calibrate(Target((*TWO.devices, Device("cuda:99", 1))))


# ---------------------------------------------------------------------------------------------- target files


def test_a_measured_target_round_trips_through_its_file(tmp_path):
    devices = tuple(Device(f"cpu:{i}", 10, 2, "", 4e-6, 1.25e-6, 2.5e-6) for i in range(2))
    links = (Link("cpu:0", "cpu:1", 7e-5, 1e10, "memory"),)
    target = Target(devices, links, "sequential", (Shared(("cpu:0", "cpu:1"), 1.4, 1.01, 2.3e10),))
    (tmp_path / "t.toml").write_text(format_target(target), encoding="utf-8")
    assert read_target(tmp_path / "t.toml") == target


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ('devices = ["cpu:0", "cpu:7"]', "'cpu:7'"),
        ('devices = ["cpu:0"]', "two or more devices"),
        ('devices = ["cpu:0", "cpu:0"]', "two or more devices"),
        ('devices = ["cpu:0", "cpu:1"]\nmemory_slowdown = 0.5', "memory_slowdown"),
        ('devices = ["cpu:0", "cpu:1"]\ncompute_slowdown = nan', "compute_slowdown"),
        ('devices = ["cpu:0", "cpu:1"]\nmemory_bytes_per_second = -1.0', "memory_bytes_per_second"),
        ('devices = ["cpu:0", "cpu:1"]\nslow = 2.0', "'slow'"),
    ],
)
def test_invalid_sharing_is_refused_with_the_file(tmp_path, entry, text):
    path = tmp_path / "t.toml"
    path.write_text(f"{format_target(TWO)}\n[[shared]]\n{entry}\n", encoding="utf-8")
    with pytest.raises(TargetError, match=r"t\.toml") as caught:
        read_target(path)
    assert text in str(caught.value)


# ---------------------------------------------------------------------------------------------- GPUs


@pytest.fixture
def driver(monkeypatch):
    """Install a fake driver that reports these capabilities between GPUs 0 and 1."""

    def install(*good: int):
        fake = types.SimpleNamespace(
            NVML_P2P_CAPS_INDEX_READ=0,
            NVML_P2P_CAPS_INDEX_NVLINK=2,
            NVML_P2P_STATUS_OK=0,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByIndex=lambda index: {0: "a", 1: "b"}[index],
            nvmlDeviceGetP2PStatus=lambda a, b, capability: 0 if (a, b) == ("a", "b") and capability in good else 5,
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)

    return install


@pytest.mark.parametrize(("good", "via"), [((0, 2), "nvlink"), ((0,), "pcie"), ((), "host")])
def test_link_technologies_are_distinguished(driver, good, via):
    driver(*good)
    assert find_link_technology("cuda:0", "cuda:1") == via
    assert find_link_technology("cuda:0", "cpu:0") == "host"
    assert find_link_technology("cpu:0", "cpu:1") == "memory"


def test_links_without_driver_information_pass_through_the_host(driver, monkeypatch):
    driver()
    assert find_link_technology("cuda:0", "cuda:5") == "host"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_link_technology("cuda:0", "cuda:1") == "host"


def test_contention_is_measured_on_processors_of_their_own() -> None:
    def device(name: str, *processors: str) -> Device:
        return Device(name, 1 << 30, processors=processors)

    target = Target(
        (
            device("openvino/cpu:0", "cpu:0"),
            device("cpu:0-1", "cpu:0", "cpu:1"),
            device("cpu:0", "cpu:0"),
            device("openvino/cpu:1", "cpu:1"),
            device("webgpu:0"),
        )
    )
    assert _list_cpus(target) == ("cpu:0", "openvino/cpu:1")
