"""Copies of a bundle on ranks of MPI: where they run, the death of one under load, and the commands."""

import os
import signal
import sys

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace_hosts.mpi import Mpi
from onnxplace_hosts.ranks.rank_plans import plan_copies
from tests.support.commands import only_json
from tests.support.endless import endless_bundle, feeds
from tests.support.fault_checks import assert_expected, wait_until
from tests.support.ranks import await_gone, read_ranks_of_copies
from tests.support.two_hosts import TWO_HOSTS, compile_alternating

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

WAIT_SECONDS = 300.0
CHAIN = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[4] x) => (float[4] y) { a = Neg(x) y = Relu(a) }
"""
SUMS = """
<ir_version: 8, opset_import: ["": 17]>
sums (float[4] x, float[4] total) => (float[4] y, float[4] total_next) {
    total_next = Add(total, x)
    y = Neg(total_next)
}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    return compile_alternating(parser.parse_model(CHAIN), tmp_path_factory.mktemp("two"), *TWO_HOSTS)


def plan(bundle, hosts, count):
    return [item.hosts for item in plan_copies(bundle.manifest, hosts, count)]


def test_copies_of_a_bundle_without_hosts_take_the_hosts_one_after_the_other(bundle):
    assert plan(bundle, "node1:2,node2:4", 3) == [("node1", "node1"), ("node2", "node2"), ("node2", "node2")]
    assert plan(bundle, "node1:4,node2:2", 2) == [("node1", "node1"), ("node2", "node2")]
    assert plan(bundle, "node[1-2]", 2) == [("node1", "node1"), ("node2", "node2")]


def test_the_first_copy_of_a_bundle_with_hosts_takes_those_and_the_others_take_further_ones(two_hosts):
    here, there = "localhost", "127.0.0.1"
    assert plan(two_hosts, "node1,localhost,127.0.0.1,node2", 2) == [(here, there), ("node1", "node2")]
    assert plan(two_hosts, "localhost:2,127.0.0.1:2", 2) == [(here, there), (here, there)]
    assert plan(two_hosts, "node[1-4]", 2) == [("node1", "node2"), ("node3", "node4")]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("", "error[K001] `hosts`: 2 copies of the bundle need a host with 2 slots each, got no list of hosts"),
        (
            "localhost:3",
            "error[K001] `hosts`: 2 copies of the bundle need a host with 2 slots each, got localhost:3, w",
        ),
        ("a,b:1", "error[K001] `hosts`: 2 copies of the bundle need a host with 2 slots each, got a,b:1, where 1 of"),
    ],
)
def test_too_few_hosts_are_refused_before_any_process_starts(bundle, hosts, message):
    with pytest.raises(onnxplace.TargetError) as caught:
        Mpi(hosts, replicas=2, remote_shell="/nowhere/ssh").open(bundle)
    assert str(caught.value).startswith(message)
    assert caught.value.hint == "as in --hosts node1:2,node2:2"


def test_copies_of_a_bundle_of_two_hosts_need_two_more(two_hosts):
    with pytest.raises(onnxplace.TargetError, match="need a host with 1 slot and a host with 1 slot each"):
        Mpi("localhost,127.0.0.1,node3", replicas=2).open(two_hosts)


@pytest.mark.parametrize("count", [0, -1, 65, 1.5, "2", True])
def test_an_impossible_number_of_copies_is_refused(bundle, count):
    with pytest.raises(onnxplace.UsageError, match=r"K001.*replicas: expected 1 to 64 copies of the bundle, got"):
        onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:4", replicas=count)


@pytest.mark.parametrize("option", [{"replicas": 2}, {"remote_shell": "ssh"}, {"interface": "lo"}])
def test_a_runtime_without_processes_refuses_their_options(bundle, option):
    (name,) = option
    with pytest.raises(onnxplace.UsageError, match=rf"U045.*runtime 'onnxruntime' has no option '{name}'"):
        onnxplace.InferenceSession(bundle, **option)


def test_a_missing_remote_shell_is_named_when_all_ranks_are_elsewhere(bundle):
    with pytest.raises(onnxplace.UsageError, match="K005"):
        Mpi("node9:2", remote_shell="/nowhere/ssh").open(bundle)


@pytest.mark.filterwarnings("ignore:.* is left out:RuntimeWarning")
@pytest.mark.slow
def test_a_rank_killed_under_load_costs_no_answer_and_its_copy_comes_back(bundle):
    options = {"runtime": "mpi", "hosts": "localhost:4", "replicas": 2, "timeout": WAIT_SECONDS, "trace": True}
    with onnxplace.InferenceSession(bundle, **options) as session:
        all_ranks = {item for ranks in read_ranks_of_copies(session) for item in ranks}
        answers = 0
        for victim in (0, 1):
            (killed, _), rounds = read_ranks_of_copies(session)[victim], iter(range(1, 1000))
            for outputs in session.stream((feeds(number) for number in range(1, 60)), in_flight=6):
                assert_expected(outputs, next(rounds))
                answers += 1
                if answers % 59 == 10:
                    os.kill(killed, signal.SIGKILL)
            wait_until(lambda victim=victim: session.list_copies()[victim].failures == 1)
            wait_until(lambda: all(item.is_open for item in session.list_copies()))
            all_ranks |= set(read_ranks_of_copies(session)[victim])
        assert answers == 118
        futures = [session.submit(feeds(3)) for _ in range(8)]
        assert {event.copy for future in futures for event in future.result(WAIT_SECONDS).events} == {0, 1}
        rows = {item.get("args", {}).get("name") for item in session.trace(last=8)["traceEvents"]}
        assert {"cpu:0 compute", "copy 1 cpu:0 compute"} <= rows
        threads = {name.rpartition(" ")[0] for name in session._session.read_remote_delays()}
        assert threads == {"0 cpu:0", "0 cpu:1", "1 cpu:0", "1 cpu:1"}
    assert len(all_ranks) == 8
    assert await_gone(all_ranks) == []


@pytest.mark.filterwarnings("ignore:.* is left out:RuntimeWarning")
def test_states_stay_on_their_copy_and_are_lost_with_it(tmp_path):
    bundle = compile_alternating(parser.parse_model(SUMS), tmp_path, *TWO_HOSTS, state=("total_next=total",))
    one = {"x": np.ones(4, np.float32)}
    start = {**one, "total": np.full(4, 10, np.float32)}
    hosts = "localhost:2,127.0.0.1:2"
    with (
        onnxplace.InferenceSession(bundle, runtime="mpi", hosts=hosts, replicas=2, timeout=WAIT_SECONDS) as session,
        session.conversation() as other,
    ):
        for user in (session, other):
            user.run(None, start)
        for total in (12, 13):
            for user in (session, other):
                np.testing.assert_array_equal(user.run(None, one)[0], np.full(4, -total, np.float32))
        assert session.count_state_changes() == other.count_state_changes() == 3
        os.kill(read_ranks_of_copies(session)[0][1], signal.SIGKILL)
        wait_until(lambda: session.list_copies()[0].failures == 1)
        np.testing.assert_array_equal(other.run(None, one)[0], np.full(4, -14, np.float32))
        with pytest.raises(onnxplace.FeedError, match=r"S007.*the copy of the bundle that had it has died"):
            session.run(None, one)
        np.testing.assert_array_equal(session.run(None, start)[0], np.full(4, -11, np.float32))
        np.testing.assert_array_equal(session.read_states()["total"], np.full(4, 11, np.float32))


def test_a_host_that_cannot_be_reached_is_named(bundle, tmp_path):
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    shell.chmod(0o700)
    with pytest.raises(onnxplace.ExecutionError, match=r"K011.*node2: the ranks ended: no route to host") as caught:
        Mpi("node2:2", remote_shell=str(shell), timeout=WAIT_SECONDS).open(bundle)
    assert "has to work without a password" in caught.value.hint


def test_a_command_notes_a_copy_that_was_left_out_once(bundle, tmp_path, run_cli):
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    shell.chmod(0o700)
    np.savez(tmp_path / "inputs.npz", **feeds(3))
    options = ("--runtime", "mpi", "--replicas", "2", "--remote-shell", str(shell), "--start-timeout", "300")
    run = run_cli(
        "run", str(bundle.path), "--inputs", str(tmp_path / "inputs.npz"), "--hosts", "localhost:2,node9:2", *options
    )
    assert run.code == 0, run.err
    assert run.err.count("node9") == 2  # the copy, and its place in the reason
    assert "note[K014] copy 1 on node9 was left out once, last: error[K011] node9: the ranks ended: no route" in run.err


@pytest.mark.slow
def test_the_commands_take_copies_and_options_of_the_launch(two_hosts, run_cli):
    options = ("--runtime", "mpi", "--hosts", "localhost:2,127.0.0.1:2", "--replicas", "2", "--interface", "lo")
    options += ("--remote-shell", "sh", "--start-timeout", "300", "--json")
    copies = only_json(run_cli("run", str(two_hosts.path), "--repeat", "4", *options))["copies"]
    assert [(item["name"], item["is_open"], item["requests"]) for item in copies] == [
        ("localhost,127.0.0.1", True, 2)
    ] * 2
    verified = only_json(run_cli("verify", str(two_hosts.path), *options))
    assert (verified["equal"], verified["steps"]) == (True, 1)
    bench = only_json(run_cli("bench", str(two_hosts.path), "--repeat", "3", "--in-flight", "4", *options))
    assert [item["failures"] for item in bench["copies"]] == [0, 0]
    assert bench["timeline"]["requests"] == 32
    one = onnxplace.load(two_hosts.path).manifest.predicted.interval_seconds
    assert bench["predicted_interval_seconds"] == pytest.approx(one / 2)
    refused = run_cli("run", str(two_hosts.path), "--replicas", "2")
    assert (refused.code, "runtime 'onnxruntime' has no option 'replicas'" in refused.err) == (2, True)
