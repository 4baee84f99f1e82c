"""What the runtime `mpi` refuses, mostly before it starts a process, and ranks that end while opening."""

import sys

import pytest
from onnx import parser

import onnxplace
from onnxplace_hosts import mpi
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.mpi import Mpi
from onnxplace_hosts.ranks import cluster, opening
from tests.support.commands import only_json
from tests.support.ranks import await_gone, find_ranks
from tests.support.two_hosts import TWO_HOSTS, compile_alternating

WAIT_SECONDS = 300.0
MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[4] x) => (float[4] y) { a = Neg(x) y = Relu(a) }
"""
needs_mpi = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")


def compile_for(folder, *devices):
    return compile_alternating(parser.parse_model(MODEL), folder, *devices)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return compile_for(tmp_path_factory.mktemp("one"), "cpu:0", "cpu:1")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    return compile_for(tmp_path_factory.mktemp("two"), *TWO_HOSTS)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("localhost:1", "error[K001] `hosts`: 2 devices of the bundle on host localhost (cpu:0, cpu:1), got 1 slot"),
        ("a:1,b:1", "error[K001] `hosts`: its devices name no host, expected one host, got a, b"),
        ("localhost:0", "error[K001] `hosts`: expected a number of devices from 1 to 1024 after the colon"),
        ("localhost:x", "error[K001] `hosts`: expected a number of devices from 1 to 1024 after the colon"),
        ("localhost:1,localhost:1", "error[K001] `hosts`: host 'localhost' is named twice"),
        (",", "error[K001] `hosts`: expected 1 to 64 hosts"),
        ("No Host", "error[T005] `hosts`: expected a host name"),
    ],
)
def test_hosts_that_do_not_fit_a_bundle_are_refused(bundle, hosts, message):
    with pytest.raises(onnxplace.InputError) as caught:
        Mpi(hosts).open(bundle)
    assert str(caught.value).startswith(message)
    assert caught.value.hint


def test_hosts_that_lack_one_of_a_bundle_are_refused_with_those_that_fit(two_hosts):
    with pytest.raises(onnxplace.TargetError) as caught:
        Mpi("localhost:2").open(two_hosts)
    assert caught.value.message == "the bundle has devices on host 127.0.0.1, which is not among the hosts given"
    assert caught.value.hint == "as in --hosts localhost:1,127.0.0.1:1"


@pytest.mark.parametrize("timeout", [0, -1.0, 1e9, float("nan")])
def test_an_impossible_timeout_is_refused(bundle, timeout):
    with pytest.raises(onnxplace.UsageError, match=r"K001.*expected more than 0 and at most 86400 seconds"):
        onnxplace.InferenceSession(bundle, runtime="mpi", timeout=timeout)


@pytest.mark.parametrize("option", [{"hosts": "localhost:2"}, {"timeout": 3.0}])
def test_a_runtime_without_hosts_refuses_them(bundle, option):
    (name,) = option
    with pytest.raises(onnxplace.UsageError, match=rf"U045.*runtime 'onnxruntime' has no option '{name}'"):
        onnxplace.InferenceSession(bundle, **option)


def test_a_missing_mpi4py_is_reported_with_its_installation(bundle, monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(onnxplace.TargetError, match=r"K005.*mpi4py is not installed here") as caught:
        Mpi("localhost:2").open(bundle)
    assert "pip install 'onnxplace[mpi]'" in caught.value.hint


@needs_mpi
def test_ranks_with_other_versions_refuse(bundle, monkeypatch):
    versions = opening.list_versions()
    monkeypatch.setattr(opening, "list_versions", lambda: {**versions, "onnxplace": "99"})
    with pytest.raises(onnxplace.TargetError, match=r"K005.*cpu:. \(rank . on localhost\): expected onnxplace 99"):
        Mpi("localhost:2", timeout=WAIT_SECONDS).open(bundle)


@needs_mpi
def test_a_device_that_its_host_does_not_have_is_named_with_the_host(tmp_path):
    bundle = compile_for(tmp_path, "localhost/cpu:0", "127.0.0.1/cuda:7")
    with pytest.raises(onnxplace.TargetError, match=r"T011.* 127.0.0.1/cuda:7: "):
        Mpi(timeout=WAIT_SECONDS).open(bundle)


class Failing(Connection):
    """Starts another program in place of the ranks."""

    def make_ranks_command(self, counts, module, *arguments):
        return ["sh", "-c", "echo no such program; exit 3"]


class Dying(Connection):
    """Starts ranks of which rank 1 dies while it opens the bundle."""

    def make_ranks_command(self, counts, module, *arguments):
        code = (
            f"import os, signal\nfrom {module} import RankProcess, main\nopen_bundle = RankProcess._open\n"
            "def die(self, frame):\n    os.kill(os.getpid(), signal.SIGKILL) if self.links.rank else None\n"
            "    return open_bundle(self, frame)\n"
            "RankProcess._open = die\nmain()"
        )
        *command, _, _ = super().make_ranks_command(counts, module)
        return [*command, "-c", code, *arguments]


@needs_mpi
@pytest.mark.parametrize(
    ("connection", "message"),
    [(Failing, "localhost: the ranks ended: no such program"), (Dying, "cpu:1: its process on host localhost died")],
)
def test_ranks_that_end_while_they_open_the_bundle_are_reported_at_once(bundle, monkeypatch, connection, message):
    before = find_ranks()
    monkeypatch.setattr(mpi, "Connection", connection)
    with pytest.raises(onnxplace.ExecutionError, match="K011") as caught:
        Mpi("localhost:2", timeout=WAIT_SECONDS).open(bundle)
    assert str(caught.value).startswith(f"error[K011] {message}")
    assert await_gone(set(find_ranks()) - set(before)) == []


@needs_mpi
@pytest.mark.slow
def test_the_commands_run_verify_and_time_a_bundle_on_ranks(two_hosts, run_cli):
    options = ("--runtime", "mpi", "--hosts", "localhost:1,127.0.0.1:1", "--start-timeout", "300", "--json")
    assert only_json(run_cli("run", str(two_hosts.path), *options))["runtime"] == "mpi"
    assert only_json(run_cli("verify", str(two_hosts.path), *options))["equal"] is True
    bench = only_json(run_cli("bench", str(two_hosts.path), "--repeat", "3", *options))
    assert [device["id"] for device in bench["devices"]] == list(TWO_HOSTS)
