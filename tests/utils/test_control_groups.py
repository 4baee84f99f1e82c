"""Limits of control groups: quotas and memory, of both versions, nested, and as namespaces show them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.ort_sessions import make_session_options, pin_thread
from onnxplace.machine.repeated_runs import RepeatPolicy, Stopwatch, find_typical_seconds
from onnxplace.utils import control_groups
from onnxplace.utils.control_groups import count_free_bytes, find_core_limit

GIB = 1 << 30
# Lines of /proc/self/mountinfo: the root of the hierarchy that is mounted, the folder, and the kind of file system.
VERSION_2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
UNIFIED = "30 31 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
CPU_1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
MEMORY_1 = "33 31 0:30 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
SYSTEMD = "34 31 0:31 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd"
OTHERS = "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n22 1 0:2 /a /data rw - nfs4 server:/a rw,vers=4"


@pytest.fixture
def write_groups(tmp_path, monkeypatch):
    """Return a function that writes the groups of a process on a machine with eight cores."""
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    find_core_limit.cache_clear()

    def write(own, mounts, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(f"{own}\n")
        (tmp_path / "proc/self/mountinfo").write_text("\n".join((OTHERS, *mounts, "")))
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    yield write
    find_core_limit.cache_clear()


def in_version_2(root="/"):
    return [VERSION_2.format(root=root)]


def in_version_1(root="/"):
    return [CPU_1.format(root=root), MEMORY_1.format(root=root), SYSTEMD]


CONTAINER = "0::/"
DOCKER_1 = "4:memory:/docker/c1\n3:cpu,cpuacct:/docker/c1\n1:name=systemd:/docker/c1"


@pytest.mark.parametrize(
    ("own", "mounts", "files", "limit"),
    [
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "60000 100000"}, 0.6, id="a container of version 2"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "max 100000"}, math.inf, id="no quota"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "max"}, math.inf, id="no period"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "150000 100000"}, 1.5, id="one and a half"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "5000 10000"}, 0.5, id="a short period"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "800000 100000"}, math.inf, id="all cores"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "6400000 100000"}, math.inf, id="more than there are"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "1000 0"}, math.inf, id="a period of zero"),
        pytest.param(CONTAINER, in_version_2(), {"cpu.max": "damaged"}, math.inf, id="another text"),
        pytest.param(CONTAINER, in_version_2(), {}, math.inf, id="no files"),
        pytest.param(CONTAINER, [], {"cpu.max": "60000 100000"}, math.inf, id="not mounted"),
        pytest.param("", in_version_2(), {"cpu.max": "60000 100000"}, math.inf, id="in no group"),
        pytest.param(
            "0::/kubepods/pod1/c1",
            in_version_2(),
            {"kubepods/cpu.max": "400000 100000", "kubepods/pod1/cpu.max": "60000 100000",
             "kubepods/pod1/c1/cpu.max": "max 100000", "kubepods/pod2/cpu.max": "1000 100000"},
            0.6,
            id="the least of the groups around it",
        ),
        pytest.param(
            "0::/a/gone (deleted)", in_version_2(), {"a/cpu.max": "200000 100000"}, 2.0, id="a group that was removed"
        ),
        pytest.param(
            DOCKER_1,
            in_version_1("/docker/c1"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "60000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.6,
            id="a container of version 1",
        ),
        pytest.param(
            DOCKER_1,
            in_version_1("/docker/c1"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            math.inf,
            id="version 1 without a quota",
        ),
        pytest.param(
            DOCKER_1,
            in_version_1(),
            {"cpu,cpuacct/docker/cpu.cfs_quota_us": "50000", "cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
             "cpu,cpuacct/docker/c1/cpu.cfs_quota_us": "250000", "cpu,cpuacct/docker/c1/cpu.cfs_period_us": "100000"},
            0.5,
            id="version 1 on the host",
        ),
        pytest.param(
            f"{DOCKER_1}\n0::/",
            [*in_version_1("/docker/c1"), UNIFIED],
            {"unified/cgroup.procs": "1", "cpu,cpuacct/cpu.cfs_quota_us": "70000",
             "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.7,
            id="both versions",
        ),
        pytest.param(
            "0::/", in_version_2("/.."), {"cpu.max": "30000 100000"}, 0.3, id="a group around that of the namespace"
        ),
        pytest.param(
            "0::/../b", in_version_2("/.."), {"b/cpu.max": "20000 100000"}, 0.2, id="moved to a neighbour that is seen"
        ),
        pytest.param(
            "0::/../b", in_version_2(), {"cpu.max": "20000 100000"}, math.inf, id="moved out of what is seen"
        ),
        pytest.param(
            "0::/../../b", in_version_2("/.."), {"cpu.max": "20000 100000"}, math.inf, id="moved out further"
        ),
        pytest.param(
            "0::/other", in_version_2("/docker/c1"), {"cpu.max": "20000 100000"}, math.inf, id="another group is seen"
        ),
        pytest.param(
            "0::/a b", [VERSION_2.format(root=r"/a\040b")], {"cpu.max": "40000 100000"}, 0.4, id="a name with a space"
        ),
    ],
)  # fmt: skip
def test_the_quota_is_the_least_of_all_groups_around_a_process(write_groups, own, mounts, files, limit):
    write_groups(own, mounts, files)
    assert find_core_limit() == limit
    assert len(available_cores()) == (8 if math.isinf(limit) else max(int(limit), 1))


def test_without_proc_there_is_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    find_core_limit.cache_clear()
    assert find_core_limit() == math.inf
    assert count_free_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    find_core_limit.cache_clear()


def test_a_quota_counts_within_the_cores_of_a_process(write_groups, monkeypatch):
    write_groups(CONTAINER, in_version_2(), {"cpu.max": "250000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 6, 7}, raising=False)
    assert available_cores() == (3, 5)
    find_core_limit.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {6, 7}, raising=False)
    assert (available_cores(), find_core_limit()) == ((6, 7), math.inf)


@pytest.mark.parametrize(
    ("own", "mounts", "files", "free"),
    [
        pytest.param(CONTAINER, in_version_2(), {"memory.max": 300, "memory.current": 100}, 200, id="version 2"),
        pytest.param(CONTAINER, in_version_2(), {"memory.max": 300, "memory.current": 400}, 0, id="above its limit"),
        pytest.param(
            CONTAINER,
            in_version_2(),
            {"memory.max": 300, "memory.current": 250, "memory.stat": "anon 10\ninactive_file 150\nactive_file 5"},
            200,
            id="files that were read",
        ),
        pytest.param(
            "0::/a/b",
            in_version_2(),
            {"memory.max": 900, "memory.current": 10, "a/memory.max": 500, "a/memory.current": 450,
             "a/b/memory.max": "max", "a/b/memory.current": 5},
            50,
            id="the least of the groups around it",
        ),
        pytest.param(
            DOCKER_1,
            in_version_1("/docker/c1"),
            {"memory/memory.limit_in_bytes": 700, "memory/memory.usage_in_bytes": 600,
             "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 40"},
            140,
            id="version 1",
        ),
    ],
)  # fmt: skip
def test_the_free_memory_is_what_the_groups_still_allow(write_groups, own, mounts, files, free):
    write_groups(own, mounts, files)
    assert count_free_bytes() == free


@pytest.mark.parametrize(
    ("own", "mounts", "files"),
    [
        (CONTAINER, in_version_2(), {"memory.max": "max", "memory.current": 100}),
        (DOCKER_1, in_version_1("/docker/c1"),
         {"memory/memory.limit_in_bytes": 9223372036854771712, "memory/memory.usage_in_bytes": 600}),
    ],
)  # fmt: skip
def test_without_a_limit_the_free_memory_is_that_of_the_host(write_groups, own, mounts, files):
    write_groups(own, mounts, files)
    assert count_free_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


# ------------------------------------------------------------------------------------------------ times below a quota


@pytest.fixture
def set_clocks(write_groups, monkeypatch):
    """Return a function that sets what the clocks tell, for a process that may use 0.5 of a core."""
    write_groups(CONTAINER, in_version_2(), {"cpu.max": "50000 100000"})

    def set_to(elapsed, cpu):
        monkeypatch.setattr("time.perf_counter", lambda: elapsed)
        monkeypatch.setattr("time.process_time", lambda: cpu)

    return set_to


@pytest.mark.parametrize(
    ("elapsed", "cpu", "delay", "share"),
    [
        pytest.param(1.0, 1.0, 0.0, -1.0, id="the quota was not used up yet"),
        pytest.param(2.0, 1.0, 1.0, 0.0, id="stopped as often as always"),
        pytest.param(4.0, 1.0, 3.0, 0.5, id="stopped longer"),
        pytest.param(2.0, 0.5, 0.25, 0.125, id="others had the core"),
        pytest.param(2.0, 0.1, 0.0, 0.0, id="waiting for something else"),
    ],
)
def test_a_run_takes_as_long_as_the_quota_lets_it_in_the_long_run(set_clocks, elapsed, cpu, delay, share):
    delays = iter(({"": 0}, {"": int(delay * 1e9)}))
    set_clocks(0.0, 0.0)
    stopwatch = Stopwatch(lambda: next(delays))
    set_clocks(elapsed, cpu)
    stopwatch.stop()
    assert stopwatch.waiting_share == pytest.approx(share)


def test_the_times_of_repeated_runs_contain_the_stops_of_a_quota(set_clocks, monkeypatch):
    """Each run needs 20 ms of the processor, and every third is stopped for 60 ms: 40 ms in the long run."""
    now, runs = [0.0, 0.0], iter(range(100))

    def call():
        now[0] += 0.02 + 0.06 * (next(runs) % 3 == 2)
        now[1] += 0.02
        set_clocks(*now)

    monkeypatch.setattr("onnxplace.machine.repeated_runs.read_run_delays", lambda pool: {})
    set_clocks(*now)
    runs_of_a_model, _ = RepeatPolicy(max_runs=12, seconds=1.0, tolerance=0.0).run(call, pool=False)
    assert runs_of_a_model.seconds == pytest.approx(0.04)
    assert runs_of_a_model.waiting == 0
    assert find_typical_seconds([0.02, 0.02, 0.08]) == pytest.approx(0.04)


def test_without_a_quota_a_time_is_the_median(write_groups):
    write_groups(CONTAINER, in_version_2(), {"cpu.max": "200000 100000"})
    assert find_typical_seconds([0.02, 0.02, 0.08]) == pytest.approx(0.02)


def test_threads_are_kept_on_cores_only_without_a_quota(write_groups, monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: taken.append(cores), raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    name = "session.intra_op_thread_affinities"
    assert make_session_options((0, 1, 2)).entries[name] == "2;3"
    with pin_thread((1,)):
        assert taken == [{1}]
    write_groups(CONTAINER, in_version_2(), {"cpu.max": "300000 100000"})
    find_core_limit.cache_clear()
    taken.clear()
    assert name not in make_session_options((0, 1, 2)).entries
    with pin_thread((1,)):
        assert taken == []


def test_costs_of_another_quota_are_not_reused(write_groups):
    without = measurement_cache.key(["costs"])
    write_groups(CONTAINER, in_version_2(), {"cpu.max": "60000 100000"})
    find_core_limit.cache_clear()
    assert measurement_cache.key(["costs"]) != without


# ------------------------------------------------------------------------------------------------------- real groups


@pytest.fixture
def real_group():
    """Return a group of version 1 or 2 with 0.6 of a core, if this user may make one."""
    for folder in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        group = folder / f"onnxplace-test-{os.getpid()}"
        try:
            group.mkdir()
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text("60000 100000")
            else:
                (group / "cpu.cfs_quota_us").write_text("60000")
            yield group
            group.rmdir()
            return
        except OSError:
            if group.is_dir():
                group.rmdir()
    pytest.skip("no group can be made here")


def test_in_a_real_group_one_device_is_offered_and_devices_says_why(real_group):
    script = f"""
import os
open({str(real_group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from onnxplace.cli.app import entry
entry()"""
    command = [sys.executable, "-c", script, "devices"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("host: 1 core (its container may use the time of 0.6), ")
    assert "cpu:0" in done.stdout
    assert "cpu:1" not in done.stdout
