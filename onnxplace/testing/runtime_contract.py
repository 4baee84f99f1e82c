"""The contract of runtimes, checked with small models on one device or two."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError, FeedError, UsageError
from onnxplace.feeds.feeds import Array
from onnxplace.pipeline.pipeline import make_pass
from onnxplace.pipeline.text_form import make_spec
from onnxplace.runtime.interface import Result, Runtime, RuntimeSession
from onnxplace.target.target import Device, Target
from onnxplace.utils.file_locks import temporary_folder

if TYPE_CHECKING:
    from onnx import ModelProto

# Each check takes milliseconds; a runtime that takes longer than this hangs.
TIMEOUT_SECONDS = 60.0

_MODEL = """
contract (float[4,4] x, int64[n] rows) => (float[2,4] y, float[4,4] z) {
    product = MatMul(x, weight)
    picked = Gather(product, rows)
    mixed = MatMul(picked, weight)
    shifted = Add(mixed, pair)
    y = Relu(shifted)
    z = Neg(product)
}
"""
# Nodes of the first device; all others are on the second one.
_FIRST_NODES = "product|y"
_STATE_MODEL = """
states (float[4] x, int64[n] rows, float[4] total) => (float[4] y, float[2] picked, float[4] total_next) {
    total_next = Add(total, x)
    opposite = Neg(total_next)
    chosen = Gather(x, rows)
    picked = Add(chosen, pair)
    y = Relu(opposite)
}
"""
_FIRST_STATE_NODES = "total_next|chosen|picked|y"
_WEIGHT: Array = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
# Added to two rows. A sum with three of them fails on every device, while GPUs check no index of a Gather.
_PAIR: Array = np.array([[0.5], [-0.25]], dtype=np.float32)

_STATE_FEEDS: dict[str, Array] = {"x": np.ones(4, dtype=np.float32), "rows": np.zeros(2, dtype=np.int64)}
_INITIAL_FEEDS: dict[str, Array] = {**_STATE_FEEDS, "total": np.full(4, -100, dtype=np.float32)}
# Three rows in place of two let a segment of either model fail.
_FAILING: dict[str, Array] = {"rows": np.zeros(3, dtype=np.int64)}


def require(condition: bool, message: str) -> None:
    """Assert, even under `python -O`."""
    if not condition:
        raise AssertionError(message)


def check_runtime(
    runtime_class: Callable[[], Runtime], *, computes: bool = True, devices: Sequence[str] = ("cpu:0", "cpu:1")
) -> None:
    """Raise AssertionError unless a runtime keeps the contract of runtimes.

    Requests return the right outputs, also when many are in flight. A request that fails or is cancelled does not
    affect the next. Closing waits for requests in flight, may be repeated, and ends all threads; later requests raise
    ExecutionError. Nothing hangs. A runtime that `keeps_state` carries states in the order of submission, until they
    are reset or a request fails. If it has conversations, each has its own states, and ends alone or with the
    session.

    Args:
        runtime_class: Creates the runtime.
        computes: False for a runtime that returns no outputs.
        devices: Ids of one device or two, which the models alternate between.

    >>> from onnxplace.pipeline import find_plugin
    >>> check_runtime(find_plugin("runtimes", "simulated"), computes=False)
    """
    with temporary_folder() as folder:
        bundle = _compile_alternating(folder, _MODEL, _FIRST_NODES, devices)
        checks = [_check_requests, _check_close]
        for check in [*checks, _check_failure_and_cancellation] if computes else checks:
            _run_in_time(lambda check=check: check(runtime_class(), bundle, computes), check.__name__)  # type: ignore[misc]
        if computes and runtime_class().keeps_state:
            stateful = _compile_alternating(folder, _STATE_MODEL, _FIRST_STATE_NODES, devices, ("total_next=total",))
            for check_states in (_check_states, _check_conversations):
                _run_in_time(lambda check=check_states: check(runtime_class(), stateful), check_states.__name__)  # type: ignore[misc]


def parse_model(text: str, **weights: Array) -> ModelProto:
    """Return a model from ONNX's text form, without its header, and with these weights."""
    from onnx import numpy_helper, parser

    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    for node in model.graph.node:
        node.name = node.name or node.output[0]
    return model


def compile_placed(
    model: ModelProto,
    folder: Path,
    target: Target,
    places: Mapping[str, str],
    *,
    state: Sequence[str] = (),
    **sizes: int,
) -> Bundle:
    """Compile a model with each node on the device that is given, by estimated costs, so that nothing is measured.

    Args:
        model: its nodes are named as their first output.
        folder: where to write the bundle; a new one.
        target: the devices.
        places: device ids by pattern of node names.
        state: pairs of a state's output and input.
        sizes: of symbolic dimensions.
    """
    from onnxplace.driver.compile import compile_model

    folder.mkdir(parents=True)
    device_map = folder / "map.json"
    device_map.write_text(json.dumps(places), encoding="utf-8")
    coplace = replace(make_pass("coplace"), join="never", device_map=str(device_map))  # type: ignore[call-arg]
    passes = f"profile{{estimate=true}},{make_spec(coplace)},fuse,m-etf,split,emit"
    output = folder / "bundle"
    return compile_model(model, output, target=target, shape=sizes, pipeline=passes, state=state, trial=False).bundle


def _compile_alternating(
    folder: Path, text: str, first_nodes: str, devices: Sequence[str], state: Sequence[str] = ()
) -> Bundle:
    """Compile a model whose nodes are on the first device, if a pattern matches their names, or else on the last."""
    target = Target(tuple(Device(name, 1 << 30) for name in devices))
    weights: dict[str, Array] = {"pair": _PAIR.ravel()} if state else {"pair": _PAIR, "weight": _WEIGHT}
    places = {first_nodes: devices[0], ".*": devices[-1]}
    name = text.split(maxsplit=1)[0]
    return compile_placed(parse_model(text, **weights), folder / name, target, places, state=state, n=2)


def _run_in_time(check: Callable[[], None], name: str) -> None:
    """Run a check with a timeout, so that a hanging runtime fails."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as problem:  # noqa: BLE001 - raised in the caller below
            problems.append(problem)

    thread = threading.Thread(target=run, name=f"onnxplace {name}", daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    require(not thread.is_alive(), f"{name[1:]}: not finished after {TIMEOUT_SECONDS:.0f} seconds")
    for problem in problems:
        raise problem


def _make_feeds(number: int) -> dict[str, Array]:
    x = np.arange(16, dtype=np.float32).reshape(4, 4) / 8 - number
    return {"x": x, "rows": np.array([number % 4, 3 - number % 4], dtype=np.int64)}


def _check_result(result: Result, number: int, computes: bool) -> None:
    require(result.seconds >= 0, f"request {number}: it took {result.seconds} seconds")
    if not computes:
        return
    feeds = _make_feeds(number)
    product = feeds["x"] @ _WEIGHT
    expected = {"y": np.maximum(product[feeds["rows"]] @ _WEIGHT + _PAIR, 0), "z": -product}
    require(set(result.outputs) == set(expected), f"request {number}: its outputs are {sorted(result.outputs)}")
    for name, values in expected.items():
        close = np.allclose(result.outputs[name], values, rtol=1e-4, atol=1e-5)
        require(close, f"request {number}: output {name!r} is {result.outputs[name]}, expected {values}")


def _check_request(session: RuntimeSession, number: int, computes: bool) -> None:
    _check_result(session.submit(_make_feeds(number)).result(TIMEOUT_SECONDS), number, computes)


def _check_requests(runtime: Runtime, bundle: Bundle, computes: bool) -> None:
    """Check one request, many requests, and the timeline."""
    with runtime.open(bundle, trace=True) as session:
        _check_request(session, 0, computes)
        futures = [session.submit(_make_feeds(number)) for number in range(20)]
        for number, future in enumerate(futures):
            _check_result(future.result(TIMEOUT_SECONDS), number, computes)
        events = session.submit(_make_feeds(0)).result(TIMEOUT_SECONDS).events
    known = {device.id for device in bundle.target.devices}
    require({event.device for event in events} == known, f"expected a timeline of the devices {known}, got {events}")
    for event in events:
        require(0 <= event.start_seconds <= event.finish_seconds, f"{event} ends before it starts")


def _check_close(runtime: Runtime, bundle: Bundle, computes: bool) -> None:
    before = set(threading.enumerate())
    with runtime.open(bundle) as session:
        futures = [session.submit(_make_feeds(number)) for number in range(3)]
        session.close()
        for number, future in enumerate(futures):
            require(future.done(), "close did not wait for a request in flight")
            _check_result(future.result(), number, computes)
        session.close()
    threads = sorted(thread.name for thread in set(threading.enumerate()) - before)
    require(not threads, f"threads are alive after close: {', '.join(threads)}")
    _check_closed(session, _make_feeds(0), "a closed session accepted a request")


def _check_failure_and_cancellation(runtime: Runtime, bundle: Bundle, computes: bool) -> None:
    with runtime.open(bundle) as session:
        failing_feeds = {**_make_feeds(0), **_FAILING}
        before, failing, after = (session.submit(f) for f in (_make_feeds(1), failing_feeds, _make_feeds(2)))
        _check_failed(failing)
        _check_result(before.result(TIMEOUT_SECONDS), 1, computes)
        _check_result(after.result(TIMEOUT_SECONDS), 2, computes)
        _check_request(session, 3, computes)
        for future in [session.submit(_make_feeds(number)) for number in range(6)]:
            future.cancel()
        _check_request(session, 4, computes)


def _check_failed(future: Future[Result]) -> None:
    problem = future.exception(TIMEOUT_SECONDS)
    require(isinstance(problem, ExecutionError), f"expected ExecutionError from a segment that fails, got {problem!r}")


def _check_states(runtime: Runtime, bundle: Bundle) -> None:
    """Check that each request reads the states of the one before it.

    A reset and a failure forget them.
    """
    feeds, initial = _STATE_FEEDS, _INITIAL_FEEDS
    with runtime.open(bundle) as session:
        futures = [session.submit(initial if number == 0 else feeds) for number in range(20)]
        for number, future in enumerate(futures):
            _check_total(future.result(TIMEOUT_SECONDS), number + 1, {"y", "picked"})
        last = session.submit(feeds, ["total_next"]).result(TIMEOUT_SECONDS)
        _check_total(last, 21, {"y", "picked", "total_next"})
        session.states.reset()
        _check_no_state(session.submit(feeds), "a reset")
        _check_total(session.submit(initial).result(TIMEOUT_SECONDS), 1, {"y", "picked"})
        failing, after = session.submit({**feeds, **_FAILING}), session.submit(feeds)
        _check_failed(failing)
        _check_no_state(after, "a failure")
        _check_total(session.submit(initial).result(TIMEOUT_SECONDS), 1, {"y", "picked"})


def _check_conversations(runtime: Runtime, bundle: Bundle) -> None:
    """Check that conversations do not share states, and that a failure or the end of one leaves the others."""
    feeds, initial = _STATE_FEEDS, _INITIAL_FEEDS
    session = runtime.open(bundle)
    try:
        conversations = [session.open_conversation() for _ in range(2)]
    except UsageError:  # it has none
        session.close()
        return
    with session:
        users = [session, *conversations]
        futures = [(user, user.submit(initial if number == 0 else feeds)) for number in range(9) for user in users]
        for index, (_, future) in enumerate(futures):
            _check_total(future.result(TIMEOUT_SECONDS), index // len(users) + 1, {"y", "picked"})
        first, second = conversations
        _check_failed(first.submit({**feeds, **_FAILING}))
        _check_no_state(first.submit(feeds), "a failure")
        _check_total(second.submit(feeds).result(TIMEOUT_SECONDS), 10, {"y", "picked"})
        last = second.submit(feeds)
        second.close()
        _check_total(last.result(TIMEOUT_SECONDS), 11, {"y", "picked"})  # closing did not end it
        _check_closed(second, initial, "a conversation accepted a request after the end of its conversation")
        _check_total(session.submit(feeds).result(TIMEOUT_SECONDS), 10, {"y", "picked"})
        session.close()
        _check_closed(first, initial, "a conversation accepted a request after the end of its session")


def _check_closed(session: RuntimeSession, feeds: Mapping[str, Array], message: str) -> None:
    try:
        session.submit(feeds).result(TIMEOUT_SECONDS)
    except ExecutionError:
        return
    raise AssertionError(message)


def _check_total(result: Result, requests: int, names: Collection[str]) -> None:
    require(set(result.outputs) == set(names), f"request {requests}: its outputs are {sorted(result.outputs)}")
    expected, y = 100 - requests, result.outputs["y"]
    require(bool((y == expected).all()), f"request {requests}: expected {expected}, got {y}")


def _check_no_state(future: Future[Result], after: str) -> None:
    problem = future.exception(TIMEOUT_SECONDS)
    require(isinstance(problem, FeedError), f"expected FeedError for a missing state after {after}, got {problem!r}")
