"""A model at twice its memory: half of the weights come from the disk while the device computes.

    python examples/cases/twice_its_memory.py [--quick] [--json]

A decoder is compiled with memory for half of its weights. Each session then runs in a process of its own: ONNX Runtime
with enough memory, and in a control group, which ends what takes too much, ONNX Runtime as it is, ONNX Runtime that
maps its file, and the bundle. Files are cold (not in the page cache) or warm, for which this case needs Linux. Control
groups need the right to make them; without it, the same sessions run without a limit, and the table says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from _case import Case, Feeds, Row, Settings, Table, check_outputs, compile_case, report_progress, run_case
from _streaming_models import Decoder, write_model
from streaming import ControlGroup, forget_pages, list_streamed

import onnxplace
from onnxplace.bundle.bundle import Bundle

CASE = Case(
    "A model at twice its memory",
    {
        "onnxruntime #23664": "https://github.com/microsoft/onnxruntime/issues/23664",
        "onnxruntime #29775": "https://github.com/microsoft/onnxruntime/issues/29775",
    },
    "Weights that do not fit the memory of an accelerator: ONNX Runtime fails when it loads the model or runs it, and"
    " the thread asks for a tool outside of it that partitions by memory.",
)

SIZES = Decoder(layers=12, width=1024, inner=4096, heads=16, kv_heads=4, vocab=8000)
QUICK_SIZES = Decoder(layers=4, width=512, inner=2048, heads=8, kv_heads=2, vocab=1000)
PAST, MANY_ROWS = 128, 256
SHARE = 0.5
"""Memory of the device, as a share of the weights."""
PROCESS_BYTES = 250_000_000
"""Python, ONNX Runtime and their libraries, which a limit of the device does not count."""
ROUNDS = {False: (3, 10), True: (1, 3)}
"""Processes of each way, and steps of each, without and with `--quick`."""
SLOW_DISK = 0.5e9
"""Bytes per second of a disk of the SATA kind."""

Record = Mapping[str, Any]
Run = Callable[[], object]
Fetch = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Way:
    """A session, and how it runs."""

    what: str
    session: str
    """`bound`: ONNX Runtime with I/O binding; `mapped`: without prepacking, so that it maps its file; `bundle`."""
    is_limited: bool = True
    is_cold: bool = True


WAYS = (
    Way("ONNX Runtime, enough memory, I/O binding", "bound", is_limited=False, is_cold=False),
    Way("ONNX Runtime in the group", "bound"),
    Way("ONNX Runtime in the group, file mapped", "mapped"),
    Way("bundle in the group, cold file", "bundle"),
    Way("bundle in the group, warm file", "bundle", is_cold=False),
)


def measure(settings: Settings) -> list[Table]:
    """Return a table of steps for one row and one for many rows, and one of openings."""
    if sys.platform != "linux":
        raise SystemExit("this case needs Linux, where a file can be dropped from the page cache")
    sizes, path = QUICK_SIZES if settings.quick else SIZES, settings.folder / "decoder.onnx"
    weight_bytes = 4 * write_model(sizes, path, np.float32)
    limit = int(SHARE * weight_bytes)
    tables, openings = [], []
    for tokens in (1, MANY_ROWS):
        feeds = sizes.feeds(1, tokens, PAST)
        bundle = compile_case(
            path,
            f"{tokens} rows",
            settings,
            devices="cpu:0",
            max_memory=limit,
            shape={"batch": 1, "sequence": tokens, "past": PAST},
            inputs=feeds,
        )
        records = run_ways(path, bundle, feeds, limit, settings)
        table = make_step_table(tokens, records, bundle, weight_bytes)
        tables.append(replace(table, how=f"{describe_rounds(settings)} with {ROUNDS[settings.quick][1]} steps each"))
        openings += list_openings(records) if tokens == 1 else []
    return [*tables, Table("Opening and the first token", openings, WAYS[0].what, describe_rounds(settings))]


def describe_rounds(settings: Settings) -> str:
    """Return how many processes of each way run."""
    count = ROUNDS[settings.quick][0]
    return f"medians of {count} process{'es' * (count > 1)}"


def run_ways(path: Path, bundle: Bundle, feeds: Feeds, limit: int, settings: Settings) -> dict[str, Record]:
    """Run each way in processes of its own, in turns; return the figures of all of its processes together."""
    files = [path.with_name(f"{path.name}.data"), *(item for item in bundle.path.rglob("*") if item.is_file())]
    given = settings.folder / "feeds.npz"
    np.savez(given, **dict[str, Any](feeds))
    records: dict[str, list[Record]] = {way.what: [] for way in WAYS}
    rounds, steps = ROUNDS[settings.quick]
    for number in range(rounds):
        for way in WAYS:
            if any("failure" in record for record in records[way.what]):
                continue  # once is enough
            report_progress(f"round {number + 1}: {way.what}")
            for file in files:
                forget_pages(file) if way.is_cold else file.read_bytes()
            job: dict[str, Any] = {
                "session": way.session,
                "model": str(bundle.path if way.session == "bundle" else path),
            }
            job |= {"feeds": str(given), "steps": steps, "outputs": str(settings.folder / f"{way.session}.npz")}
            records[way.what].append(run_job(job, limit + PROCESS_BYTES if way.is_limited else 0))
    with np.load(settings.folder / "bound.npz") as expected, np.load(settings.folder / "bundle.npz") as outputs:
        check_outputs("bundle", outputs, expected)
    return {what: join_records(items) for what, items in records.items()}


def run_job(job: Record, limit: int) -> Record:
    """Run a session in a process, in a control group with a limit in bytes; 0 for none. Return its figures."""
    command = [sys.executable, __file__, "child", json.dumps(dict(job))]
    with ExitStack() as stack:
        try:
            group = stack.enter_context(ControlGroup(limit)) if limit else None
        except SystemExit:  # no right to make one
            group = None
        if group is None:
            process, anonymous = subprocess.run(command, stdout=subprocess.PIPE, text=True), 0
        else:
            process, anonymous, _ = group.run(command)
    note = {"anonymous_bytes": anonymous} if anonymous else {}
    if process.returncode:
        return {"failure": "killed" if process.returncode < 0 else f"exit code {process.returncode}", **note}
    return {**json.loads(process.stdout.splitlines()[-1]), **note, "is_limited": group is not None}


def join_records(records: Sequence[Record]) -> Record:
    """Return the figures of equal jobs as one: steps of all, medians of openings, the largest memory."""
    if failed := [record for record in records if "failure" in record]:
        return failed[0]
    joined = {**records[0], "steps": [second for record in records for second in record["steps"]]}
    joined["opening"] = float(np.median([record["opening"] for record in records]))
    joined["first"] = float(np.median([record["first"] for record in records]))
    joined["anonymous_bytes"] = max(record.get("anonymous_bytes", 0) for record in records)
    return joined


def make_step_table(tokens: int, records: Mapping[str, Record], bundle: Bundle, weight_bytes: int) -> Table:
    """Return the table of a step, with what the bundle reads, and what a slower disk would make of it."""
    manifest, rows = bundle.manifest, []
    streamed = sum(size for _, _, size in list_streamed(bundle))
    for way in WAYS:
        record = records[way.what]
        if "failure" in record:
            rows.append(Row(way.what, note=record["failure"]))
            continue
        low, median, high = (float(value) for value in np.quantile(record["steps"], (0.1, 0.5, 0.9)))
        predicted = manifest.predicted.step_seconds if way.session == "bundle" else None
        memory = f"{record['anonymous_bytes'] / 1e6:,.0f} MB of its own" if record["anonymous_bytes"] else ""
        is_free = way.is_limited and not record["is_limited"]
        rows.append(Row(way.what, predicted, median, low, high, note="no group could be made" if is_free else memory))
    what = f"bundle, with a disk of {SLOW_DISK / 1e9:.1f} GB/s"
    rows.append(Row(what, streamed / SLOW_DISK, note="bytes over rate", is_bound=True))
    device, waits = manifest.devices[0], manifest.predicted.weight_wait_seconds or 0.0
    pool_bytes = manifest.streams[0].pool_bytes
    stay_bytes, value_bytes = device.weights_bytes - pool_bytes, device.peak_bytes - device.weights_bytes
    sizes = (weight_bytes, streamed, stay_bytes, pool_bytes, value_bytes, device.peak_bytes, device.limit_bytes)
    weights, read, stay, pool, values, peak, limit = (f"{size / 1e6:,.0f} MB" for size in sizes)
    remark = (
        f"Weights: {weights}, of which {read} are read in each step. The device holds {stay} of weights that stay, a"
        f" pool of {pool} and {values} of values, in all {peak} of {limit} allowed. Of the rest, the table of"
        " embeddings, ONNX Runtime maps the file and reads the rows that it needs. Predicted:"
        f" {waits * 1e3:.1f} ms of the step wait for weights."
    )
    return Table(f"{tokens} token{'s' * (tokens > 1)} after {PAST}", rows, WAYS[0].what, remarks=[remark])


def list_openings(records: Mapping[str, Record]) -> list[Row]:
    """Return what it takes until the first token, for each way that opens."""
    return [
        Row(what, measured=record["opening"] + record["first"], note=f"of which opening {record['opening']:.2f} s")
        for what, record in records.items()
        if "failure" not in record
    ]


# ------------------------------------------------------------------------------------------------- in the child process


def run_child(job: Record) -> None:
    """Open a session, run it, write its outputs, and print its figures."""
    with np.load(job["feeds"]) as stored:
        feeds = dict(stored)
    began = time.perf_counter()
    with open_session(job, feeds) as (run, fetch):
        opened = time.perf_counter()
        run()
        first, steps = time.perf_counter(), list[float]()
        for _ in range(job["steps"]):
            step = time.perf_counter()
            run()
            steps.append(time.perf_counter() - step)
        np.savez(job["outputs"], **fetch())
    print(json.dumps({"opening": opened - began, "first": first - opened, "steps": steps}))


@contextmanager
def open_session(job: Record, feeds: Feeds) -> Iterator[tuple[Run, Fetch]]:
    """Open a session; yield a function that runs a step, and one that returns its outputs by name."""
    if job["session"] == "bundle":
        with onnxplace.InferenceSession(job["model"]) as session:
            names = [item.name for item in session.get_outputs()]
            yield partial(session.run, None, feeds), lambda: dict(zip(names, session.run(None, feeds)))
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if job["session"] == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
    plain = onnxruntime.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
    names, binding = [item.name for item in plain.get_outputs()], plain.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for name in names:
        binding.bind_output(name)
    yield partial(plain.run_with_iobinding, binding), lambda: dict(zip(names, binding.copy_outputs_to_cpu()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(json.loads(sys.argv[2]))
    else:
        run_case(CASE, measure)
