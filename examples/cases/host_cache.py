"""Sixty cache tensors of a decoder: through the host at each token, or kept where they are.

    python examples/cases/host_cache.py [--quick]

A decoder of 30 layers has 60 tensors of keys and values. A plain loop feeds and fetches all of them for each token.
Bound outputs that become the next inputs, or `--state`, leave them on the device. On a processor there is little to
save, since its memory is the host's; the second table prices the same for the GPU of the first thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from _case import (
    Case,
    Feeds,
    Row,
    Settings,
    Table,
    Timing,
    check_outputs,
    compile_case,
    report_progress,
    run_case,
    time_calls,
    timed_row,
)
from machines import declared_weights, place_weights
from numpy.typing import NDArray

import models
import onnxplace
from decoder import decoder
from onnxplace.target import Device, Target
from onnxplace.target.machines import parse_machine
from onnxplace.target.target import default_link

CASE = Case(
    "Sixty cache tensors that go through the host at each token",
    {
        "vernacula #51": "https://github.com/christopherthompson81/vernacula/pull/51",
        "speech-core #46": "https://github.com/soniqo/speech-core/pull/46",
    },
    "A speech decoder on an RTX 3090 copied 60 cache tensors to the host and back for each token: 30.8 ms, and 8.8 ms "
    "when they stayed. Another one on an RTX 5090: 106 ms, and 69 ms.",
)

LAYERS, PAST, TOKENS = 30, 128, 16
STATE = ["present.*=past.*"]
BASELINE = "one session, all cores, I/O binding: outputs become inputs"
WITH_ARRAYS, WITH_STATES = "onnxplace, all cores, arrays fed and fetched", "onnxplace, all cores, --state"
PUBLISHED = {"through the host": 30.8e-3, "kept": 8.8e-3}
"""Seconds a token in the first thread."""
SPEECH_CORE_BYTES = 200e6
"""What crosses for a token in the second thread, both ways together."""
SPEECH_PAST = 200
"""Tokens before a token there, assumed: the thread has 174 tokens after a prompt that it does not describe."""


def generate(step: Callable[[NDArray[np.int64]], NDArray[np.float32]], count: int) -> NDArray[np.int64]:
    """Return the tokens that follow token 7, the likeliest one each time; `step` maps a token to logits."""
    token, tokens = np.array([[7]]), []
    for _ in range(count):
        token = step(token)[:, -1:].argmax(axis=-1)
        tokens.append(token)
    return np.concatenate(tokens, axis=1)


def run_with_arrays(session: Any, cache: Feeds, count: int) -> NDArray[np.int64]:
    """Generate with a session of either kind that is fed all arrays, and returns all, for each token."""
    current = dict(cache)

    def step(token: NDArray[np.int64]) -> NDArray[np.float32]:
        logits, *present = session.run(None, {"tokens": token, **current})
        current.update(zip(cache, present))
        return np.asarray(logits)

    return generate(step, count)


def run_bound(session: onnxruntime.InferenceSession, cache: Feeds, count: int) -> NDArray[np.int64]:
    """Generate with a session of ONNX Runtime whose outputs are bound as the next inputs."""
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in cache.items()}
    outputs = [item.name for item in session.get_outputs()]

    def step(token: NDArray[np.int64]) -> NDArray[np.float32]:
        binding = session.io_binding()
        binding.bind_cpu_input("tokens", token)
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        values.update(zip(cache, present))
        return np.asarray(logits.numpy())

    return generate(step, count)


def run_with_states(session: onnxplace.InferenceSession, cache: Feeds, count: int) -> NDArray[np.int64]:
    """Generate with a bundle that keeps its states; the first token brings them."""
    session.reset_state()
    initial = dict(cache)

    def step(token: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = session.run(None, {"tokens": token, **initial})[0]
        initial.clear()
        return np.asarray(logits)

    return generate(step, count)


def measure_here(settings: Settings) -> Table:
    """Return the time of a token in each way, on the processor."""
    model = settings.folder / "decoder.onnx"
    models.save(decoder(layers=4 if settings.quick else LAYERS, hidden=128, positions=PAST + TOKENS), model)
    shape = {"batch": 1, "seq": 1, "past": PAST}
    plain = compile_case(model, "arrays", settings, devices="cpu:0", shape=shape)
    kept = compile_case(model, "states", settings, devices="cpu:0", shape=shape, state=STATE)
    random = np.random.default_rng(0)
    cache = {
        item.name: random.standard_normal((1, 4, PAST, 32), dtype=np.float32)
        for item in plain.inputs
        if "past" in item.name
    }
    whole, single = (open_session(model, threads) for threads in (0, 1))
    report_progress("running")
    with onnxplace.InferenceSession(plain) as with_arrays, onnxplace.InferenceSession(kept) as with_states:
        calls: dict[str, Callable[[], NDArray[np.int64]]] = {
            BASELINE: lambda: run_bound(whole, cache, TOKENS),
            "one session, all cores, arrays fed and fetched": lambda: run_with_arrays(whole, cache, TOKENS),
            "one session, one core, I/O binding": lambda: run_bound(single, cache, TOKENS),
            "one session, one core, arrays fed and fetched": lambda: run_with_arrays(single, cache, TOKENS),
            WITH_ARRAYS: lambda: run_with_arrays(with_arrays, cache, TOKENS),
            WITH_STATES: lambda: run_with_states(with_states, cache, TOKENS),
        }
        expected = calls[BASELINE]()
        for what, call in calls.items():
            check_outputs(what, {"tokens": call()}, {"tokens": expected})
        timings = time_calls(calls, settings)
    predicted = {
        WITH_ARRAYS: plain.manifest.predicted.step_seconds,
        WITH_STATES: kept.manifest.predicted.step_seconds,
    }
    rows = []
    for what, timing in timings.items():
        per_token = Timing(timing.seconds / TOKENS, timing.low / TOKENS, timing.high / TOKENS)
        rows.append(timed_row(what, per_token, predicted.get(what)))
    remark = (
        f"{len(cache)} cache tensors of {next(iter(cache.values())).nbytes / 1e3:.0f} kB; {TOKENS} tokens in a row."
    )
    how = f"medians of {settings.rounds} times {TOKENS} tokens, in turns"
    return Table("A token on the processor of this machine", rows, BASELINE, how, [remark])


def open_session(model: Path, threads: int) -> onnxruntime.InferenceSession:
    """Open a model on the processor with so many threads; 0 for all cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def make_gpu() -> Device:
    """Return an RTX 3090: 35.6 TFLOPS and 936 GB/s, as in https://holynerdvana.blogspot.com/2022/10/."""
    card = parse_machine("RTX-4090").to_target().devices[0]
    return replace(
        card,
        model="NVIDIA GeForce RTX 3090",
        operations_per_second=35.6e12,
        type_operations_per_second={"float16": 142e12},
        memory_bytes_per_second=936e9,
    )


def simulate_published(settings: Settings) -> Table:
    """Return what a token of the published decoder is predicted to take on its GPU, next to what was published.

    The decoder is generated, with 30 layers of width 1024 and 16 heads, as the speech model has; its weights are holes
    of a file. What crosses to the host and back is 60 values each way over the default link of a GPU.
    """
    with declared_weights():
        model = decoder(layers=LAYERS, hidden=1024, heads=16, vocab=8194, positions=4096)
    place_weights(model, settings.folder)
    path = settings.folder / "speech.onnx"
    onnx.save(model, path)
    gpu = make_gpu()
    shape = {"batch": 1, "seq": 1, "past": SPEECH_PAST}
    plan = onnxplace.plan(path, target=Target((gpu,)), shape=shape, state=STATE, estimate=True, effort="low")
    kept = next(item.step_seconds for item in plan.strategies if item.step_seconds)
    link = default_link(gpu, Device("cpu:0", 1))
    size = 2 * LAYERS * 1024 * np.dtype(np.float32).itemsize
    crossing = 2 * 2 * LAYERS * link.latency_seconds + size * (2 * SPEECH_PAST + 1) / link.bytes_per_second
    rows = [
        Row("cache through the host", kept + crossing, PUBLISHED["through the host"]),
        Row("cache kept on the GPU", kept, PUBLISHED["kept"]),
        Row("the difference", crossing, PUBLISHED["through the host"] - PUBLISHED["kept"]),
        Row("the difference in speech-core #46", SPEECH_CORE_BYTES / link.bytes_per_second, 106e-3 - 69e-3),
    ]
    return Table("A token on a GPU, simulated; what was measured is the threads' own", rows)


def measure(settings: Settings) -> list[Table]:
    """Return the tables of this processor and of the published GPU."""
    return [measure_here(settings), simulate_published(settings)]


if __name__ == "__main__":
    run_case(CASE, measure)
