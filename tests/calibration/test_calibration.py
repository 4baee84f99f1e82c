"""Calibration: fits, samples on a busy machine, bundles made to be timed, and `devices --calibrate`."""

import json
import re
import sys
import types
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.bundle.program_check import check_programs
from onnxplace.calibration import TRANSFER_SIZES_BYTES, calibrate, calibrator
from onnxplace.calibration.calibrator import _build_target, _choose_sizes, _describe_sharing, _fit_links, _list_notes
from onnxplace.calibration.link_fit import UNBOUNDED_BYTES_PER_SECOND, fit_link
from onnxplace.calibration.microbenchmarks import (
    CallCosts,
    Contention,
    HopSamples,
    Slowdown,
    _make_hop_task,
    estimate_undisturbed,
)
from onnxplace.calibration.probe_bundles import Probe, write_probe_bundle
from onnxplace.calibration.samples import RequestTimes, Samples, read_waited_seconds, run_once, take_turns
from onnxplace.errors import TargetError, UsageError
from onnxplace.machine import link_technology
from onnxplace.pipeline import find_plugin
from onnxplace.runtime import Event, Result, RuntimeSession
from onnxplace.target import SEGMENT_OVERHEAD_SECONDS, Device, Link, Shared, Target, format_target, read_target
from onnxplace.target.target import SEGMENT_SECONDS

TWO = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
WAYS = ("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")
TINY = ("devices", "--calibrate", "--devices", "cpu:0,cpu:1", "--sizes", "1,4KiB,1MiB", "--seconds", "0.2")

latencies = st.floats(1e-6, 5e-5)
bandwidths = st.floats(1e9, 5e9)


# ---------------------------------------------------------------------------------------------- the fit


def times(latency: float, bandwidth: float) -> np.ndarray:
    return latency + np.array(TRANSFER_SIZES_BYTES) / bandwidth


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e11))
def test_a_fit_finds_the_line_that_times_lie_on(latency, bandwidth):
    found = fit_link(TRANSFER_SIZES_BYTES, times(latency, bandwidth))
    assert found.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert found.worst_error < 1e-6
    assert not any(point.outlier for point in found.points)


@given(latencies, bandwidths, st.randoms(use_true_random=False))
def test_a_fit_of_noisy_times_is_off_by_no_more_than_the_noise(latency, bandwidth, random):
    noise = np.array([random.uniform(0.95, 1.05) for _ in TRANSFER_SIZES_BYTES])
    found = fit_link(TRANSFER_SIZES_BYTES, times(latency, bandwidth) * noise)
    assert found.latency_seconds == pytest.approx(latency, rel=0.1)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=0.1)


@given(
    latencies,
    bandwidths,
    st.sets(st.integers(0, len(TRANSFER_SIZES_BYTES) - 1), min_size=1, max_size=3),
    st.floats(6, 30),
)
def test_outliers_are_named_and_do_not_move_the_fit(latency, bandwidth, wrong, factor):
    measured = times(latency, bandwidth)
    measured[list(wrong)] *= factor
    found = fit_link(TRANSFER_SIZES_BYTES, measured)
    assert {index for index, point in enumerate(found.points) if point.outlier} == wrong
    assert found.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert found.worst_error < 1e-6


@given(latencies, bandwidths, st.integers(0, len(TRANSFER_SIZES_BYTES) - 1), st.floats(1.5, 4))
def test_a_point_that_is_off_moves_the_fit_a_little_and_stays_in_it(latency, bandwidth, wrong, factor):
    measured = times(latency, bandwidth)
    measured[wrong] *= factor
    found = fit_link(TRANSFER_SIZES_BYTES, measured)
    assert not any(point.outlier for point in found.points)
    assert found.latency_seconds == pytest.approx(latency, rel=0.15)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=0.15)


@given(latencies, bandwidths, st.randoms(use_true_random=False))
def test_a_fit_moves_no_more_than_its_points(latency, bandwidth, random):
    """Also where no line fits: half of the bandwidth beyond 16 MiB."""
    bent = times(latency, bandwidth) + np.maximum(np.array(TRANSFER_SIZES_BYTES) - (1 << 24), 0) / bandwidth
    other = bent * np.array([random.uniform(0.95, 1.05) for _ in TRANSFER_SIZES_BYTES])
    one, two = fit_link(TRANSFER_SIZES_BYTES, bent), fit_link(TRANSFER_SIZES_BYTES, other)
    assert two.bytes_per_second == pytest.approx(one.bytes_per_second, rel=0.15)
    assert two.latency_seconds == pytest.approx(one.latency_seconds, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-9, 10)), min_size=1, max_size=15))
def test_whatever_was_measured_the_fit_is_a_link(points):
    sizes, seconds = zip(*points)
    found = fit_link(sizes, seconds)
    Link("cpu:0", "cpu:1", found.latency_seconds, found.bytes_per_second)
    for point in found.points:
        fitted = found.latency_seconds + point.bytes / found.bytes_per_second
        assert fitted == pytest.approx((1 + point.relative_error) * point.seconds, rel=1e-6, abs=2e-6)


def test_transfers_too_small_to_show_a_bandwidth_have_none():
    found = fit_link([1, 2, 4], [3e-5, 3e-5, 3e-5])
    assert found.bytes_per_second == pytest.approx(UNBOUNDED_BYTES_PER_SECOND)
    assert found.latency_seconds == pytest.approx(3e-5)


@pytest.mark.parametrize("points", [([], []), ([1], [0.0]), ([1], [float("nan")]), ([1, 2], [1.0])])
def test_what_cannot_be_fitted_is_refused(points):
    with pytest.raises(ValueError, match="points"):
        fit_link(*points)


# ---------------------------------------------------------------------------------------------- samples


def test_samples_that_waited_for_a_core_do_not_count_where_others_did_not():
    samples = Samples()
    samples.add([1.0, 2.0, 9.0], 0.01)
    samples.add([0.1, 50.0], 0.4)
    assert samples.calm == 3
    assert samples.typical() == 2.0


def test_the_quickest_counts_where_nearly_all_waited():
    samples = Samples([5.0, 4.0, 6.0], [0.9, 0.2, 0.0])
    assert samples.typical() == 4.0


def test_the_quicker_times_count_of_what_did_not_wait():
    calm = Samples([4.0, 1.0, 5.0, 2.0, 3.0], [0.0] * 5)
    assert estimate_undisturbed(calm) == 2.0
    calm.add([0.1] * 9, 0.5)
    assert estimate_undisturbed(calm) == 2.0
    assert estimate_undisturbed(Samples([5.0, 4.0, 6.0], [0.9, 0.2, 0.0])) == 4.0


@given(st.floats(0, 0.7), st.floats(1.1, 3), st.randoms(use_true_random=False))
def test_a_machine_that_is_slow_for_most_of_the_time_says_what_it_takes_otherwise(share, slower, random):
    slow = int(100 * share)
    seconds = [random.uniform(1.0, 1.05) * (slower if index < slow else 1.0) for index in range(100)]
    assert 1.0 <= estimate_undisturbed(Samples(seconds, [0.0] * 100)) <= 1.05


def test_waiting_is_known_and_never_shrinks():
    before = read_waited_seconds()
    sum(range(10_000))
    assert 0 <= before <= read_waited_seconds()


def test_turns_go_round_first_and_then_to_whoever_has_taken_least_time(monkeypatch):
    now, done = [0.0], []
    monkeypatch.setattr("onnxplace.calibration.samples.time.perf_counter", lambda: now[0])

    def task(name, seconds):
        def once():
            done.append(name)
            now[0] += seconds

        return once

    take_turns([task("a", 1.0), task("b", 4.0)], seconds=20.0, least=2)
    assert done == ["a", "b"] * 2 + ["a"] * 7 + ["b"]
    assert now[0] == 21.0


def test_without_time_each_task_has_its_least_number_of_turns():
    done = []
    take_turns([lambda: done.append("a"), lambda: done.append("b")], seconds=0, least=2)
    assert done == ["a", "b"] * 2


def test_events_are_told_apart_by_kind_and_device():
    events = (
        Event("cpu:0", "run", "0", 0.0, 1.0),
        Event("cpu:1", "run", "1", 2.0, 5.0),
        Event("cpu:1", "copy", "v", 1, 2),
    )
    ran = RequestTimes(events, 0.0)
    assert ran.taken("run") == [1.0, 3.0]
    assert ran.taken("run", "cpu:1") == [3.0]
    assert set(ran.runs()) == {"0", "1"}


# ---------------------------------------------------------------------------------------------- probes


def test_probes_pass_values_between_devices_as_any_bundle_does(tmp_path):
    probes = [Probe(f"cpu:{i % 2}", f"v{i + 1} = Identity(v{i})", (f"v{i}",), (f"v{i + 1}",)) for i in range(4)]
    bundle = write_probe_bundle(tmp_path, TWO, probes)
    check_programs(bundle.manifest, tmp_path)
    with find_plugin("runtimes", "onnxruntime")().open(bundle, trace=True) as session:
        ran = run_once(session, {"v0": np.ones(3, np.uint8)})
    assert [event.name for event in ran.events if event.kind == "run"] == ["0", "1", "2", "3"]
    assert {event.name for event in ran.events if event.kind == "copy"} == {"v1", "v2", "v3"}
    starts, ends = ([getattr(e, f"{end}_seconds") for e in ran.runs().values()] for end in ("start", "finish"))
    assert all(end <= start for end, start in zip(ends, starts[1:]))


class Replayed(RuntimeSession):
    """Gives the same events for each request."""

    def __init__(self, events):
        self._events = tuple(events)

    def submit(self, feeds, also=()):
        future = Future()
        future.set_result(Result({}, self._events, 1.0))
        return future

    def close(self):
        pass


def test_hops_are_told_apart_by_direction_and_the_first_ones_do_not_count():
    events, now = [], 0.0
    for index, gap in enumerate([0.0, 50.0, 60.0, 1.0, 2.0, 3.0, 4.0]):
        start = now + gap
        now = start + 10 + index
        events.append(Event(f"cpu:{index % 2}", "run", str(index), start, now))
    found = {way: HopSamples() for way in WAYS}
    once = _make_hop_task(Replayed(events), 1, 6, found)
    for _ in range(3):
        once()
    assert found[WAYS[0]].by_size[1].seconds == [2.0] * 3  # the middle of 1 and 3, without 50
    assert found[WAYS[1]].by_size[1].seconds == [3.0] * 3
    assert found[WAYS[0]].woken.seconds == [14.0] * 3


def test_calls_and_devices_at_once_are_measured_beside_every_pair(monkeypatch):
    taken, told = [], []

    def turns(tasks, seconds, least):
        taken.append((len(tasks), seconds))
        take_turns(tasks, 0, 1)

    monkeypatch.setattr(calibrator, "take_turns", turns)
    three = Target((*TWO.devices, Device("cpu:2", 1 << 30)))
    found = calibrate(three, sizes=[1, 1 << 17], seconds=6.0, observer=lambda *said: told.append(said))
    # Five kinds of calls per device; three kinds of work, on each device alone and on all; two sizes.
    assert taken == [(3 * 5 + 3 * 4 + 2, 2.0)] * 3
    assert told == [("cpu:0 <-> cpu:1", 0, 3), ("cpu:0 <-> cpu:2", 1, 3), ("cpu:1 <-> cpu:2", 2, 3)]
    assert len(found.links) == 6
    assert all(link.calm_samples.keys() == {1, 1 << 17} for link in found.links)


def test_sizes_are_as_far_apart_as_each_other_so_that_none_counts_twice():
    assert (TRANSFER_SIZES_BYTES[0], TRANSFER_SIZES_BYTES[-1]) == (1, 256 << 20)
    assert {after / before for before, after in pairwise(TRANSFER_SIZES_BYTES)} == {4.0}


# ---------------------------------------------------------------------------------------------- what follows


def hops(latency: float, bandwidth: float) -> HopSamples:
    found = HopSamples(
        {size: Samples([time] * 3, [0.0] * 3) for size, time in zip(TRANSFER_SIZES_BYTES, times(latency, bandwidth))}
    )
    found.woken.add([3e-5] * 3, 0.0)
    return found


CALLS = {name: CallCosts(4e-6, 1e-6, 2e-6, copied_seconds=1e-5) for name in ("cpu:0", "cpu:1")}


def test_directions_that_are_alike_are_one_link_whose_latency_has_the_waking():
    found = _fit_links({WAYS[0]: hops(5e-5, 5e9), WAYS[1]: hops(6e-5, 4.5e9)}, TWO.devices, CALLS)
    assert [(item.link.source, item.link.destination) for item in found] == list(WAYS)
    assert all(item.symmetric for item in found)
    assert found[0].fit == found[1].fit
    assert 7e-5 < found[0].link.latency_seconds < 8e-5
    assert 4.5e9 <= found[0].link.bytes_per_second <= 5e9


def test_directions_that_differ_are_two_links():
    found = _fit_links({WAYS[0]: hops(5e-5, 5e9), WAYS[1]: hops(5e-5, 1e9)}, TWO.devices, CALLS)
    assert not any(item.symmetric for item in found)
    assert [round(item.link.bytes_per_second / 1e9, 3) for item in found] == [5.0, 1.0]


def at_once(memory: float, compute: float, copy: float) -> Contention:
    return Contention(*(Slowdown(factor, 40, 2e-3) for factor in (memory, compute, copy)))


def test_sharing_is_written_where_it_shows():
    assert _describe_sharing(("cpu:0", "cpu:1"), None) == ()
    assert _describe_sharing(("cpu:0", "cpu:1"), at_once(1.02, 1.04, 1.5)) == ()
    (entry,) = _describe_sharing(("cpu:0", "cpu:1"), at_once(1.4, 1.0, 1.1))
    assert (entry.memory_slowdown, entry.compute_slowdown) == (1.4, 1.0)
    assert entry.memory_bytes_per_second == pytest.approx(4 * 4096**2 / 2e-3)


def test_a_machine_too_busy_to_tell_is_said_to_be_so():
    slower = Contention(Slowdown(1.0, 2, 2e-3), Slowdown(1.0, 40, 2e-3), Slowdown(1.0, 0, 2e-3))
    (note,) = _list_notes([], slower)
    assert "memory, copy" in note
    assert _list_notes([], at_once(1.0, 1.0, 1.0)) == ()


@pytest.mark.parametrize(("copy", "model"), [(1.1, "duplex"), (1.7, "duplex"), (1.9, "sequential")])
def test_copies_that_wait_for_each_other_share_one_channel(copy, model):
    assert _build_target(TWO, [], CALLS, at_once(1.1, 1.0, copy)).link_model == model


def test_sizes_beyond_the_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(calibrator, "available_memory_bytes", lambda: 1 << 20)
    assert _choose_sizes([1 << 17, 1, 1 << 18, 1]) == (1, 1 << 17)
    assert _choose_sizes([1 << 30]) == (1 << 30,)


@pytest.mark.parametrize("sizes", [[], [0], [-1, 5]])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(UsageError, match=r"U015"):
        calibrate(TWO, sizes=sizes)


def test_a_gpu_that_is_not_here_is_named_before_anything_is_measured():
    with pytest.raises(TargetError, match=r"cuda:99"):
        calibrate(Target((*TWO.devices, Device("cuda:99", 1))))


# ---------------------------------------------------------------------------------------------- target files


def test_a_target_with_all_that_is_measured_survives_its_file(tmp_path):
    devices = tuple(Device(f"cpu:{i}", 10, 2, "", 4e-6, 1.25e-6, 2.5e-6) for i in range(2))
    links = (Link("cpu:0", "cpu:1", 7e-5, 1e10, "memory"),)
    target = Target(devices, links, "sequential", (Shared(("cpu:0", "cpu:1"), 1.4, 1.01, 2.3e10),))
    (tmp_path / "t.toml").write_text(format_target(target), encoding="utf-8")
    assert read_target(tmp_path / "t.toml") == target


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('devices = ["cpu:0", "cpu:7"]', "'cpu:7'"),
        ('devices = ["cpu:0"]', "two devices"),
        ('devices = ["cpu:0", "cpu:0"]', "two devices"),
        ('devices = ["cpu:0", "cpu:1"]\nmemory_slowdown = 0.5', "memory_slowdown"),
        ('devices = ["cpu:0", "cpu:1"]\ncompute_slowdown = nan', "compute_slowdown"),
        ('devices = ["cpu:0", "cpu:1"]\nmemory_bytes_per_second = -1.0', "memory_bytes_per_second"),
        ('devices = ["cpu:0", "cpu:1"]\nslow = 2.0', "'slow'"),
    ],
)
def test_sharing_that_cannot_be_is_refused_with_the_file(tmp_path, entry, said):
    path = tmp_path / "t.toml"
    path.write_text(f"{format_target(TWO)}\n[[shared]]\n{entry}\n", encoding="utf-8")
    with pytest.raises(TargetError, match=r"t\.toml") as caught:
        read_target(path)
    assert said in str(caught.value)


# ---------------------------------------------------------------------------------------------- GPUs


@pytest.fixture
def driver(monkeypatch):
    """Pretend to a driver that knows these capabilities between GPUs 0 and 1."""

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
def test_nvlink_pcie_and_the_way_through_the_host_are_told_apart(driver, good, via):
    driver(*good)
    assert link_technology("cuda:0", "cuda:1") == via
    assert link_technology("cuda:0", "cpu:0") == "host"
    assert link_technology("cpu:0", "cpu:1") == "memory"


def test_a_driver_that_cannot_tell_leaves_the_way_through_the_host(driver, monkeypatch):
    driver()
    assert link_technology("cuda:0", "cuda:5") == "host"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert link_technology("cuda:0", "cuda:1") == "host"


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_measures_every_pair_and_writes_a_target_that_compiles(run_cli, here, model_file, fast_pipeline):
    ran = run_cli(*TINY, "-o", "target.toml", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    links = {(link["source"], link["destination"]): link for link in found["calibration"]["links"]}
    assert set(links) == set(WAYS)
    for link in links.values():
        assert [point["bytes"] for point in link["points"]] == [1, 4096, 1 << 20]
        assert all(point["seconds"] > 0 for point in link["points"])
        assert link["via"] == "memory"
    assert {device["id"] for device in found["calibration"]["devices"]} == {"cpu:0", "cpu:1"}
    written = read_target(here / "target.toml")
    assert {(link.source, link.destination): link.latency_seconds for link in written.links} == {
        way: link["latency_seconds"] for way, link in links.items()
    }
    for device, told in zip(written.devices, found["calibration"]["devices"], strict=True):
        assert device.id == told["id"]
        assert device.segment_seconds == told["segment_seconds"]
        assert told["segment_seconds"] == pytest.approx(told["call_seconds"] + told["assumed_apart_seconds"])
        assert (device.input_seconds, device.output_seconds) == (told["input_seconds"], told["output_seconds"])
    assert [device["segment_seconds"] for device in found["default"]] == [SEGMENT_SECONDS] * 2
    assert found["output"] == "target.toml"
    compiled = run_cli(
        *("compile", model_file, "--shape", "batch=2", "--target", "target.toml", "--pipeline", fast_pipeline, "--json")
    )
    assert compiled.code == 0, compiled.err


def test_a_target_file_says_of_which_machine_it_is_and_is_replaced_by_the_next(run_cli, here, monkeypatch):
    monkeypatch.setattr(
        "onnxplace.machine.measurement_cache.processor",
        lambda: json.dumps({"model name": "Imaginary 9000", "flags": "x"}),
    )
    assert run_cli("devices", "--devices", "cpu:0,cpu:1", "-o", "target.toml").code == 0
    before = Path("target.toml").read_text(encoding="utf-8")
    assert before.startswith("# machine: Imaginary 9000, ")
    assert "not measured" in before.splitlines()[1]
    read_target("target.toml")
    ran = run_cli(*TINY, "-o", "target.toml")
    assert ran.code == 0
    assert ran.out.endswith("target: target.toml\n")
    header = next(line for line in ran.out.splitlines() if line.startswith("each segment"))
    assert re.split(" {2,}", header) == [
        *("each segment", "costs", "its call, measured", "caches and copies, assumed", "each input", "each output")
    ]
    row = ran.out.splitlines()[ran.out.splitlines().index(header) + 1].split()
    told = read_target("target.toml").devices[0]
    assert row[:3] == ["cpu:0", f"{told.segment_seconds * 1e6:.1f}", "us"]
    assert float(row[3]) + float(row[5]) == pytest.approx(float(row[1]), abs=0.11)
    after = Path("target.toml").read_text(encoding="utf-8")
    assert after.splitlines()[0] == before.splitlines()[0]
    assert "measured by devices --calibrate" in after.splitlines()[1]
    assert [link.via for link in read_target("target.toml").links] == ["memory"] * 2
    assert [path.name for path in here.iterdir()] == ["target.toml"]


def test_the_summary_shows_the_fit_beside_each_size_and_names_the_file_option(run_cli, here):
    ran = run_cli(*TINY)
    assert ran.code == 0
    assert "target: " not in ran.out
    assert "cpu:0" in ran.out
    assert "1048576" in ran.out
    assert "GB/s" in ran.out
    assert "--target" in ran.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sizes", "1"), "--calibrate"),
        (("--seconds", "1"), "--calibrate"),
        (("--calibrate", "--sizes", "lots"), "lots"),
        (("--calibrate", "--sizes", "0"), "0 bytes"),
        (("--calibrate", "--seconds", "0"), "--seconds"),
        (("--calibrate", "--seconds", "nan"), "--seconds"),
        (("--calibrate", "--devices", "cuda:99"), "cuda:99"),
        (("--calibrate", "--devices", "tpu:0"), "tpu:0"),
        (("--calibrate", "-o", "nowhere/target.toml"), "nowhere"),
        (("--calibrate", "-o", "."), "folder"),
    ],
)
def test_what_cannot_be_measured_or_written_is_said_before_any_work(run_cli, here, monkeypatch, arguments, said):
    monkeypatch.setattr(calibrator, "prepare_calls", lambda *_: pytest.fail("measured"))
    ran = run_cli("devices", *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert list(here.iterdir()) == []


def test_an_interrupted_calibration_leaves_the_old_file_and_nothing_else(run_cli, here, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    Path("target.toml").write_text("old")
    monkeypatch.setattr(calibrator, "prepare_hops", interrupted)
    assert run_cli(*TINY, "-o", "target.toml").code == 130
    assert [path.name for path in here.iterdir()] == ["target.toml"]
    assert Path("target.toml").read_text() == "old"


def test_one_device_has_no_links_and_shares_nothing(run_cli, here):
    ran = run_cli("devices", "--calibrate", "--devices", "cpu:0", "--seconds", "0.1", "--json", "-o", "one.toml")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["calibration"]
    assert (found["links"], found["shared"]) == ([], [])
    expected = found["devices"][0]["call_seconds"] + SEGMENT_OVERHEAD_SECONDS
    assert read_target("one.toml").devices[0].segment_seconds == pytest.approx(expected)
