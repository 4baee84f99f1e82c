"""Surveys of hosts: what they are made of, and whole ones over MPI where it is installed."""

import json
import queue
import threading
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from onnxplace.errors import ExecutionError, TargetError, UsageError
from onnxplace.target.target import Device, Pool, Target
from onnxplace.target.target_file import format_target, read_target
from onnxplace_doctor.link_fit import fit_link
from onnxplace_hosts import survey as survey_module
from onnxplace_hosts.connection import Connection, Mpich, OpenMpi, find_launcher
from onnxplace_hosts.ranks.link_ranks import SIZES_BYTES, follow, lead
from onnxplace_hosts.survey import (
    HostDescription,
    HostLink,
    HostSurvey,
    _fit_links,
    _require_equal_versions,
    survey_hosts,
)
from tests.support.namespaces import connect_two_nodes, find_obstacle

HAS_OPEN_MPI = find_spec("mpi4py") is not None and isinstance(find_launcher(), OpenMpi)
needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed: the extra [mpi]")
VERSIONS = {"onnxplace": "1", "onnxruntime": "2", "python": "3", "mpi4py": "4", "mpich": "5"}


def describe(name: str, *ids: str, **versions: str) -> HostDescription:
    devices = tuple(Device(item, 1 << 30, cores=2) for item in ids or ("cpu:0", "cpu:1"))
    return HostDescription(name, {**VERSIONS, **versions}, Target(devices).with_all_links())


def test_a_survey_becomes_a_target_of_all_devices_and_links(tmp_path):
    fit = fit_link([1, 10**6], [1e-5, 1.01e-3])
    survey = HostSurvey((describe("a"), describe("b", "cpu:0")), (HostLink(("a", "b"), fit, 45e-6),))
    target = survey.target
    assert [device.id for device in target.devices] == ["a/cpu:0", "a/cpu:1", "b/cpu:0"]
    forward, back = target.links[-2:]
    assert (forward.source, forward.destination, back.source, back.destination) == ("a", "b", "b", "a")
    assert forward.latency_seconds == back.latency_seconds == pytest.approx(55e-6, rel=1e-3)
    assert forward.bytes_per_second == pytest.approx(1e9, rel=1e-3)
    assert target.list_assumed_links() == []
    (tmp_path / "cluster.toml").write_text(format_target(target))
    assert read_target(tmp_path / "cluster.toml") == target


def test_pools_of_hosts_are_those_of_their_devices():
    fit, host = fit_link([1, 10**6], [1e-5, 1.01e-3]), describe("b")
    host = replace(host, target=replace(host.target, pools=(Pool(("cpu:0", "cpu:1"), 1 << 30),)))
    survey = HostSurvey((describe("a"), host), (HostLink(("a", "b"), fit, 45e-6),))
    assert survey.target.pools == (Pool(("b/cpu:0", "b/cpu:1"), 1 << 30),)


def test_links_are_fitted_to_the_lower_quartile_of_each_size():
    samples = [(0, 1, size, (1e-5 + size / 1e9) * factor) for size in SIZES_BYTES for factor in (1, 1, 1, 3, 9)]
    (link,) = _fit_links((describe("a"), describe("b")), samples)
    assert link.hosts == ("a", "b")
    assert link.fit.latency_seconds == pytest.approx(1e-5, rel=0.05)
    assert link.fit.bytes_per_second == pytest.approx(1e9, rel=0.05)
    assert link.waking_seconds == 45e-6


@pytest.mark.parametrize(
    ("versions", "code", "words"),
    [
        ({"onnxplace": "2"}, "K005", "expected onnxplace 1, as on a, got 2"),
        ({"mpich": ""}, "K005", "expected mpich 5, as on a, got none"),
        ({"mpi4py": ""}, "K005", "mpi4py is not installed there"),
    ],
)
def test_hosts_with_other_versions_are_refused(versions, code, words):
    with pytest.raises(TargetError, match=words) as caught:
        _require_equal_versions([describe("a"), describe("b", **versions)])
    assert (caught.value.code, caught.value.where) == (code, "host b")


def test_a_package_that_the_first_host_does_not_have_is_named():
    with pytest.raises(TargetError, match="expected mpich none, as on a, got 5"):
        _require_equal_versions([describe("a", mpich=""), describe("b")])


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan")])
def test_impossible_times_are_refused_before_anything_runs(seconds):
    with pytest.raises(UsageError, match=r"K001.*`seconds`"):
        survey_hosts(["a", "b"], seconds=seconds)


@pytest.fixture
def no_launcher_needed(monkeypatch):
    monkeypatch.setattr(survey_module, "find_launcher", lambda: Mpich("mpiexec"))


def test_output_of_start_up_files_is_skipped_and_errors_of_a_host_name_it(write_shell, no_launcher_needed):
    shell = write_shell('echo "Welcome to $host"; exec sh -c "$*"')
    with pytest.raises(TargetError) as caught:
        survey_hosts(["node1", "node2"], devices="cuda:97", connection=Connection(shell))
    assert caught.value.code == "T011"
    assert caught.value.where == "host node1, cuda:97"


def test_an_answer_that_is_not_ours_is_an_error(write_shell, no_launcher_needed):
    with pytest.raises(ExecutionError, match=r"K007.*host node1: expected a line of JSON.*got 'hello'"):
        survey_hosts(["node1", "node2"], connection=Connection(write_shell("echo hello")))


# ---------------------------------------------------------------------------------------------- messages


class FakeWorld:
    """Two ranks as threads, whose values take some time on a clock that nothing else moves."""

    def __init__(self, seconds_per_byte: float, seconds_per_look: float = 0.0) -> None:
        self.queues: tuple[queue.Queue, queue.Queue] = (queue.Queue(), queue.Queue())
        self.seconds_per_byte, self.seconds_per_look = seconds_per_byte, seconds_per_look
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += self.seconds_per_look
        return self.now

    def end(self, own: int) -> "FakeEnd":
        return FakeEnd(self, own)


class FakeEnd:
    def __init__(self, world: FakeWorld, own: int) -> None:
        self.world, self.own = world, own

    def send(self, array) -> None:
        self.world.now += array.nbytes * self.world.seconds_per_byte
        self.world.queues[1 - self.own].put(array.copy())

    def receive(self) -> np.ndarray:
        return self.world.queues[self.own].get(timeout=60)


@pytest.fixture
def measure(monkeypatch):
    """Return a function that measures the link of a fake world, by its clock."""

    def measure_link(world: FakeWorld, seconds: float) -> list[tuple[int, float]]:
        monkeypatch.setattr("onnxplace_hosts.ranks.link_ranks.time", world)
        return measure_between_threads(world, seconds)

    return measure_link


def measure_between_threads(world: FakeWorld, seconds: float) -> list[tuple[int, float]]:
    follower = threading.Thread(target=follow, args=(world.end(1),))
    follower.start()
    samples = lead(world.end(0), seconds)
    follower.join(60)
    assert not follower.is_alive()
    assert all(item.empty() for item in world.queues)
    return samples


def test_all_sizes_are_measured_where_that_is_quick(measure):
    assert {size for size, _ in measure(FakeWorld(0.0, seconds_per_look=0.01), 0.5)} == set(SIZES_BYTES)


def test_a_slow_link_is_measured_with_small_messages_only(measure):
    world = FakeWorld(1e-4)
    sizes = {size for size, _ in measure(world, 0.5)}  # 64 MiB would take almost two hours
    assert {1, 4, 16} <= sizes
    assert max(sizes) <= 4096
    assert world.now < 20


# ---------------------------------------------------------------------------------------------- whole surveys


@needs_mpi
@pytest.mark.skipif(HAS_OPEN_MPI, reason="Open MPI takes hosts for one that tell it the same name")
def test_two_hosts_are_surveyed_and_compiled_for(
    run_cli, local_shell, tmp_path, monkeypatch, model_file, fast_pipeline
):
    monkeypatch.chdir(tmp_path)
    options = ("--hosts", "node1,node2", "--devices", "cpu:0", "--seconds", "0.5", "--remote-shell", local_shell)
    result = run_cli("hosts", *options, "-o", "cluster.toml", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert [host["name"] for host in data["hosts"]] == ["node1", "node2"]
    (link,) = data["links"]
    assert link["latency_seconds"] == pytest.approx(link["message_seconds"] + link["assumed_waking_seconds"])
    assert read_target("cluster.toml").hosts == ("node1", "node2")
    compiled = run_cli(
        "compile", model_file, "--shape", "batch=2", "--target", "cluster.toml", "--pipeline", fast_pipeline
    )
    assert compiled.code == 0, compiled.err
    assert "T013" not in compiled.err
    table = run_cli("hosts", *options)
    assert table.code == 0, table.err
    assert "node1 - node2" in table.out


@needs_mpi
@pytest.mark.skipif(HAS_OPEN_MPI, reason="Open MPI takes hosts for one that tell it the same name")
def test_a_network_that_does_not_exist_is_an_error(run_cli, local_shell):
    options = ("--hosts", "node1,node2", "--devices", "cpu:0", "--remote-shell", local_shell)
    result = run_cli("hosts", *options, "--seconds", "0.5", "--interface", "nosuch0")
    assert result.code == 4
    assert "error[K007] node1, node2: MPI failed with exit code 255: unable to find interface nosuch0" in result.err


@needs_mpi
def test_messages_between_two_network_namespaces_cross_the_network(run_cli, tmp_path):
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with connect_two_nodes(tmp_path) as nodes, nodes.on_first():
        before = nodes.count_crossed_bytes()
        options = ("--hosts", "node1,node2", "--devices", "cpu:0", "--seconds", "1")
        options += ("--remote-shell", nodes.remote_shell, "--interface", nodes.interface)
        result = run_cli("hosts", *options, "--json", "--timeout", "300")
        assert result.code == 0, result.err
        (link,) = json.loads(result.out)["links"]
        largest = max(point["bytes"] for point in link["points"])
        assert largest >= 1 << 20  # a busy machine leaves out the largest ones
        assert nodes.count_crossed_bytes() - before > 2 * largest
        # A cable that is pulled: an error that names the hosts, not a wait for ever.
        nodes.set_cable("down")
        result = run_cli("hosts", *options, "--timeout", "120")
        assert result.code == 4
        assert "error[K007] node1, node2: MPI failed" in result.err
        if not HAS_OPEN_MPI:  # which ends without a word at times
            assert "on node2: unable to connect" in result.err
        elif "it gave no reason" not in result.err:
            assert "on node2: A daemon failed to report" in result.err
