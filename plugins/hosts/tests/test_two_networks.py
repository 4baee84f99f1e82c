"""The runtime `mpi` on two hosts: network namespaces with a cable between them; root only."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace_hosts import mpi
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.mpi import Mpi
from tests.conftest import branches
from tests.support.chains import mlp
from tests.support.commands import only_json
from tests.support.endless import endless_bundle, expected, feeds
from tests.support.namespaces import NODES, connect_two_nodes, find_obstacle, run_ip
from tests.support.ranks import await_gone
from tests.support.two_hosts import compile_alternating, make_target

pytest.importorskip("mpi4py")
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here"), pytest.mark.slow]

# Far more than it takes, also on a busy machine: to report the end of a rank, and all else.
REPORTED_SECONDS, WAIT_SECONDS = 60.0, 300.0
BIG = """
<ir_version: 8, opset_import: ["" : 17]>
big (float[300000] x) => (float[300000] y) { a = Neg(x) y = Relu(a) }
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two hosts; the tests leave no process, file or network there."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXPLACE_CACHE_DIR", str(folder / "cache"))
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        with connect_two_nodes(folder) as two_nodes:
            # What a user sets where the hosts' names are not those of the network for messages.
            for name in ("HYDRA_IFACE", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include"):
                patch.setenv(name, two_nodes.interface)
            patch.setenv("PATH", str(folder), prepend=os.pathsep)
            yield two_nodes
            assert await_gone(two_nodes.list_processes()) == []
        assert list((folder / "temporary").iterdir()) == []
    assert two_nodes.prefix not in run_ip("netns", "list")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return compile_alternating(parser.parse_model(BIG), tmp_path_factory.mktemp("big"), *NODES)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The loop is on node2."""
    folder, (first, second) = tmp_path_factory.mktemp("endless"), NODES
    target = make_target(*NODES)
    return endless_bundle(folder, spin=second, last=first, other=first, devices=None, target=target)


def open_nodes(nodes, bundle, trace=False):
    with nodes.on_first():
        return Mpi(remote_shell=nodes.remote_shell, interface=nodes.interface, timeout=WAIT_SECONDS).open(
            bundle, trace=trace
        )


def read_rank_ids(session):
    processes = session.engine.worker._cluster._processes
    return [processes[rank] for rank in sorted(processes)]


def test_values_cross_the_cable_and_traces_of_both_hosts_have_one_clock(nodes, big):
    x = np.arange(300_000, dtype=np.float32) - 7
    with open_nodes(nodes, big, trace=True) as session:
        before = nodes.count_crossed_bytes()
        results = [session.submit({"x": x + index}).result(WAIT_SECONDS) for index in range(3)]
        # The value between both nodes, and the output, which node2 sends back.
        assert nodes.count_crossed_bytes() - before > 3 * 2 * x.nbytes
    for index, result in enumerate(results):
        np.testing.assert_array_equal(result.outputs["y"], np.maximum(-(x + index), 0))
        assert {event.device for event in result.events} == set(NODES)
        assert all(0 <= event.start_seconds <= event.finish_seconds <= result.seconds for event in result.events)


def test_the_commands_run_a_bundle_on_two_hosts_as_ssh_reaches_them(nodes, big, run_cli):
    before = nodes.count_crossed_bytes()
    with nodes.on_first():
        verified = only_json(run_cli("verify", str(big.path), "--runtime", "mpi", "--start-timeout", "300", "--json"))
    assert verified["equal"] is True
    assert nodes.count_crossed_bytes() - before > 2 * 4 * 300_000


def test_bundles_compiled_for_a_survey_of_two_hosts_are_verified_there(nodes, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = ("--remote-shell", nodes.remote_shell, "--interface", nodes.interface)
    onnx.save(branches(), "towers.onnx")
    onnx.save(mlp(), "sharded.onnx")
    with nodes.on_first():
        options = ("--hosts", "node1,node2", "--devices", "cpu:0", "--seconds", "0.5", *network)
        assert run_cli("hosts", *options, "-o", "cluster.toml").code == 0
        placed = "profile{estimate=true},coplace{join=never},m-topo,split,emit"
        ways = {
            "towers": ("--pipeline", placed, "--shape", "batch=4"),
            "sharded": ("--objective", "fit", "--shard", "2"),
        }
        for name, how in ways.items():
            arguments = (f"{name}.onnx", "-o", f"{name}.bundle", "--target", "cluster.toml", *how)
            result = run_cli("compile", *arguments, "--json")
            assert result.code == 0, result.err
            compiled = only_json(result)
            before = nodes.count_crossed_bytes()
            options = ("--runtime", "mpi", *network, "--start-timeout", "300", "--json")
            assert only_json(run_cli("verify", f"{name}.bundle", *options))["equal"] is True
            assert nodes.count_crossed_bytes() > before
            assert {device["id"] for device in compiled["devices"]} == set(NODES)
            assert bool(compiled["sharding"]) == (name == "sharded")


@pytest.mark.parametrize(
    ("rank", "number", "message"),
    [
        (0, signal.SIGKILL, "node1/cpu:0: its process on host node1 died (SIGKILL)"),
        (1, signal.SIGKILL, "node2/cpu:0: its process on host node2 died (SIGKILL)"),
        (1, signal.SIGSTOP, "node2/cpu:0: its process on host node2 has not answered for"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_with_its_host(nodes, endless, rank, number, message):
    with open_nodes(nodes, endless) as session:
        ranks = read_rank_ids(session)
        np.testing.assert_array_equal(session.submit(feeds(2)).result(WAIT_SECONDS).outputs["y"], expected(2)[0])
        future = session.submit(feeds(None))
        time.sleep(0.3)
        os.kill(ranks[rank], number)
        assert str(future.exception(REPORTED_SECONDS)).startswith(f"error[K011] {message}")
    assert await_gone(ranks) == []


def test_a_pulled_cable_is_reported_and_a_new_session_opens_after_it_is_put_in_again(nodes, endless):
    with open_nodes(nodes, endless) as session:
        ranks = read_rank_ids(session)
        future = session.submit(feeds(None))
        time.sleep(0.3)
        nodes.set_cable("down")
        try:
            problem = future.exception(REPORTED_SECONDS)
        finally:
            nodes.set_cable("up")
            nodes.await_cable()
        assert str(problem).startswith("error[K011] node2/cpu:0: its process on host node2 has not answered for")
    assert await_gone(ranks) == []
    with open_nodes(nodes, endless) as session:
        assert len(session.submit(feeds(1)).result(WAIT_SECONDS).outputs) == 2


DRIVER = """
import sys
from onnxplace import load
from onnxplace_hosts.mpi import Mpi
from tests.support.endless import feeds
session = Mpi(remote_shell=sys.argv[2], interface=sys.argv[3], timeout=300).open(load(sys.argv[1]))
print(*session.engine.worker._cluster._processes.values(), flush=True)
session.submit(feeds(None)).result()
"""


def test_no_rank_outlives_a_user_process_that_is_killed(nodes, endless):
    command = [sys.executable, "-c", DRIVER, str(endless.path), nodes.remote_shell, nodes.interface]
    with nodes.on_first(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        ranks = [int(item) for item in driver.stdout.readline().split()]
        time.sleep(0.3)
        driver.kill()
        driver.communicate(timeout=WAIT_SECONDS)
    assert len(ranks) == 2
    assert await_gone(ranks) == []


class Absent(Connection):
    """Starts ranks of which that on node2 lacks a module."""

    def make_ranks_command(self, counts, module, *arguments):
        code = (
            f"import socket\nif socket.gethostname() == 'node2':\n    import absent\nfrom {module} import main\nmain()"
        )
        *command, _, _ = super().make_ranks_command(counts, module)
        return [*command, "-c", code, *arguments]


def test_a_rank_that_exits_before_it_joins_is_reported_and_not_waited_for(nodes, big, monkeypatch):
    monkeypatch.setattr(mpi, "Connection", Absent)
    with pytest.raises(onnxplace.ExecutionError) as caught:
        open_nodes(nodes, big)
    message = "node2/cpu:0: its process on host node2 died (exit code 1): ModuleNotFoundError: No module named 'absent'"
    assert str(caught.value).startswith(f"error[K011] {message}")
