"""The command and the options that the plugin adds: found by entry points, and what a command says without them."""

import re

import pytest

import onnxplace
from onnxplace.cli.app import load_plugin_command
from onnxplace.pipeline.registry import create_runtime, list_options
from onnxplace.plugins import list_entries
from onnxplace_hosts.commands import RUN_OPTIONS


def test_options_of_several_hosts_are_described_once(run_cli):
    texts = {name: run_cli(name, "--help").out for name in ("run", "verify", "bench")}
    assert [name for name, text in texts.items() if "copies of the bundle" in " ".join(text.lower().split())] == ["run"]
    for name in ("verify", "bench"):
        assert "  --hosts, --replicas, --start-timeout, --remote-shell, --interface\n" in texts[name]
        assert "`onnxplace run --help`" in texts[name]


def test_the_command_is_listed_by_what_it_does_and_has_its_own_help(run_cli):
    assert re.search(r"^  hosts +Show the devices of several hosts, and measure links\.$", run_cli("--help").out, re.M)
    assert "--hosts node1,node2" in run_cli("hosts", "--help").out


def test_options_of_the_command_line_are_arguments_of_the_runtime(run_cli, bundle_copy):
    assert list_options("runtime_options")["mpi"] is RUN_OPTIONS
    create_runtime("mpi", **dict.fromkeys(RUN_OPTIONS))
    for line in (("--hosts", "localhost:2"), ("--replicas=2",), ("--start-timeout", 5), ("--interface", "lo")):
        result = run_cli("run", bundle_copy, *line)
        assert (result.code, "use the runtime mpi, which has" in result.err) == (2, True), result.err
    assert "0 is not in the range" in run_cli("run", bundle_copy, "--start-timeout", 0).err


def test_a_misspelt_argument_is_offered_those_of_the_runtime(bundle_copy):
    with pytest.raises(TypeError, match=r"there is no argument 'hots'\n.*did you mean 'hosts'"):
        onnxplace.InferenceSession(bundle_copy, hots="localhost:2")


@pytest.fixture
def without_plugin(monkeypatch):
    """No entry points, as where the packages of the plugin are missing."""
    caches = list_entries, list_options
    monkeypatch.setattr("onnxplace.cli.app.load_plugin_command", load_plugin_command.__wrapped__)
    monkeypatch.setattr("onnxplace.plugins.metadata.entry_points", lambda group: ())
    for item in caches:
        item.cache_clear()
    yield
    for item in caches:
        item.cache_clear()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (("hosts", "--hosts", "node1,node2"), "command 'hosts'"),
        (("run", "BUNDLE", "--runtime", "mpi"), "runtime 'mpi'"),
        (("verify", "BUNDLE", "--hosts", "localhost:2"), "option '--hosts'"),
        (("run", "BUNDLE", "--start-timeout=3"), "option '--start-timeout'"),
    ],
)
def test_without_the_plugin_its_names_are_refused_with_what_to_install(
    run_cli, bundle_copy, without_plugin, line, what
):
    result = run_cli(*(bundle_copy if item == "BUNDLE" else item for item in line))
    assert result.code == 2
    assert f"error[U001] {what} is part of the plugin onnxplace-hosts, which is not installed" in result.err
    assert "pip install 'onnxplace[mpi]'" in result.err
    assert run_cli("run", bundle_copy).code == 0
    assert "With --runtime" not in run_cli("run", "--help").out
    assert "error[U000]" in run_cli("compile", "model.onnx", "--replicas", 2).err
