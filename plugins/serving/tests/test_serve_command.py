"""The command `onnxplace serve`, as far as it ends by itself; test_server.py has the server."""

import asyncio
import re
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

from onnxplace_serving.serve import serve, stop_on_signals
from tests.support import endless
from tests.support.fault_checks import HUNG_SECONDS


@pytest.fixture
def served(monkeypatch):
    """Let servers end as soon as they answer, and keep their models."""
    kept = []

    async def end_at_once(models, limits, listener, grpc_address, stop, announce):
        announce()
        kept.append((models, limits))
        for model in models.models.values():
            model.session.close()

    monkeypatch.setattr("onnxplace_serving.server.run_server", end_at_once)
    return kept


def test_models_are_named_after_their_folders_or_as_the_user_says(run_cli, served, compiled):
    result = run_cli("serve", compiled, f"other={compiled}", "--port", "0", "--grpc-port", "0", "--warmup")
    assert result.code == 0, result.err
    assert result.out.startswith("bundle, other: http://127.0.0.1:")
    assert "SIGTERM or Ctrl-C ends the server" in result.err
    (models, limits) = served[0]
    assert list(models.models) == ["bundle", "other"]
    assert (limits.max_queue, limits.max_request_bytes) == (128, 64 << 20)


def test_requests_are_joined_where_that_is_proven_and_a_note_says_where_not(run_cli, served, compiled, tmp_path):
    other = endless.endless_bundle(tmp_path).path
    result = run_cli("serve", f"a={compiled}", f"b={other}", "--max-batch", 4, "--port", "0", "--grpc-port", "0")
    assert result.code == 0, result.err
    assert "note[U083]" in result.err
    assert "it is served without that" in result.err
    assert {name: model.max_batch for name, model in served[0][0].models.items()} == {"a": 4, "b": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{bundle}", "{bundle}"), ("error[U005]", "two models have the name 'bundle'", "onnxplace serve NAME=")),
        (("a/b={bundle}",), ("error[U005]", "got 'a/b'", "letters, digits")),
        ((".={bundle}",), ("error[U005]", "got '.'")),
        (("..={bundle}",), ("error[U005]", "got '..'", "onnxplace serve NAME=")),
        (("stats={bundle}",), ("error[U005]", "got 'stats'")),
        (("-a={bundle}",), ("error[U000]", "no such option")),
        (("a\n={bundle}",), ("error[U005]", "letters, digits")),
        (("{bundle}", "--timeout", "nan"), ("'nan' is not a finite number",)),
        (("{bundle}", "--timeout", "inf"), ("--timeout", "inf")),
        (("{bundle}", "--timeout", "-1"), ("--timeout", "-1")),
        (("{bundle}", "--max-delay", "nan"), ("error[U005]", "got nan")),
        (("{bundle}", "--max-request", "nan"), ("error[U005]", "got 'nan'")),
        (("a={bundle}", "--max-in-flight", "0"), ("error[U005]", "--max-in-flight to be an integer from 1 to 1024")),
        (("{bundle}", "--max-request", "much"), ("error[U005]", "expected an amount of memory, got 'much'")),
        (("{bundle}", "--max-batch", "0"), ("error[U005]", "expected max_batch to be an integer from 1")),
        (("nowhere",), ("error[N001]", "nowhere")),
        (("{bundle}", "--host", "256.1.1.1"), ("error[U090]", "256.1.1.1:0: cannot listen", "--host")),
    ],
)
def test_what_cannot_be_served_is_refused(run_cli, compiled, arguments, words):
    result = run_cli("serve", *(text.format(bundle=compiled) for text in arguments), "--port", "0", "--grpc-port", "0")
    assert result.code == 2
    assert [word for word in words if word not in result.err] == []


def test_a_port_in_use_is_named(run_cli, compiled):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options in (("--port", port), ("--port", "0", "--grpc-port", port)):
            result = run_cli("serve", compiled, *options)
            assert result.code == 2
            assert f"error[U090] 127.0.0.1:{port}: cannot listen" in result.err
            assert "choose another --port, --grpc-port or --host" in result.err


def test_missing_packages_are_named_with_their_extra(run_cli, compiled, monkeypatch):
    monkeypatch.setattr("onnxplace_serving.server.find_spec", lambda name: None if name == "grpc" else name)
    result = run_cli("serve", compiled)
    assert result.code == 2
    assert "error[U110] serve: a server needs grpc, which is not installed" in result.err
    assert "pip install 'onnxplace[serve]'" in result.err


def test_a_path_that_exists_is_a_path_also_with_an_equals_sign(run_cli, served, bundle_copy, monkeypatch):
    monkeypatch.chdir(bundle_copy.parent)
    bundle_copy.rename("a=b")
    result = run_cli("serve", "a=b")
    assert result.code == 2
    assert "got 'a=b'" in result.err
    result = run_cli("serve", "c=a=b", "--port", "0", "--grpc-port", "0")
    assert result.code == 0, result.err
    assert [model.bundle.path.name for model in served[0][0].models.values()] == ["a=b"]


def test_a_second_signal_ends_the_server_outside_of_its_tasks():
    reached, previous = [], signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    async def serve_until_signals():
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()
            signal.raise_signal(signal.SIGTERM)
            reached.append("after the second signal")
            await asyncio.sleep(HUNG_SECONDS)

    try:
        with pytest.raises(SystemExit, match="143"):
            asyncio.run(serve_until_signals())
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert reached


@pytest.mark.parametrize("name", ["Dockerfile", "onnxplace-serve.service"])
def test_the_examples_start_the_server_with_options_that_it_has(name):
    text = (Path(__file__).parents[3] / "examples" / "serve" / name).read_text(encoding="utf-8")
    (line,) = re.findall(r"^(?:ENTRYPOINT|ExecStart=).*onnxplace serve (.*)", text, re.MULTILINE)
    arguments = shlex.split(line.partition(' \\"$@')[0])
    context = serve.make_context("serve", arguments)
    assert context.params["warmup"]
    assert (context.params["port"], context.params["timeout"]) == (8000, 60.0)
