"""Weights that stream: what they cost, measured and in simulation (docs/streaming.md).

    python benchmarks/streaming.py group --folder /scratch      # a decoder of 6 GB in a control group of 2.5 GB
    python benchmarks/streaming.py webgpu                       # a transformer of 4 times the memory allowed
    python benchmarks/streaming.py machines                     # UNet and decoder on an RTX 4090, estimated
    python benchmarks/streaming.py unchanged --before v1.2.0    # enough memory: files, steps and opening as before

`group` needs Linux and the right to make a control group; it takes 12 GB of disk. Each session runs in a process of its
own in a group of its own, and sessions take turns: ONNX Runtime as it is, ONNX Runtime's mapping of the whole file
(`session.disable_prepacking`), and the bundle. Between its steps, each process reads what a step reads without
computing, so that both rates are of one run. `webgpu` times a step in turns with a bundle that holds all weights and
with bringing them alone; `.ci/webgpu` installs a GPU in software. Both print the predicted step next to the measured
one. `machines` estimates: nothing is measured, and weights are holes of a file. `--json F` writes all figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Behind PYTHONPATH, by which `unchanged` chooses another version.
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from _tables import divide, print_table, report_progress

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
Job = Mapping[str, Any]
Range = tuple[str, int, int]
"""Path, offset and bytes."""
READ_BYTES = 16 << 20
SAMPLE_SECONDS = 0.01
CORES = 2


# ---------------------------------------------------------------------------------------------------- control groups


class ControlGroup:
    """A control group with a limit of memory; a context manager that removes it.

    The folder of version 1 or 2, and its files for the limit, the peak with the page cache, and anonymous memory now.
    """

    VERSIONS = (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "total_rss"),
        ("/sys/fs/cgroup", "memory.max", "memory.peak", "anon"),
    )

    def __init__(self, limit_bytes: int) -> None:
        problems = []
        for version in self.VERSIONS:
            root, limit, self._peak, self._anonymous = version
            self.path = Path(root, f"onnxplace-{os.getpid()}")
            try:
                self.path.mkdir()
                (self.path / limit).write_text(str(limit_bytes))
            except OSError as problem:
                problems.append(f"{problem.filename}: {problem.strerror}")
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                continue
            return
        raise SystemExit(f"no control group can be made here, so nothing is measured ({'; '.join(problems)})")

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.rmdir()

    def run(self, command: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], int, int]:
        """Run a command in it; return it, its peak of anonymous memory, and that of all, in bytes."""
        enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(self.path), *command]
        over, peak = threading.Event(), 0

        def sample() -> None:
            nonlocal peak
            while not over.wait(SAMPLE_SECONDS):
                lines = (self.path / "memory.stat").read_text().splitlines()
                peak = max(peak, *(int(size) for name, size in map(str.split, lines) if name == self._anonymous))

        watcher = threading.Thread(target=sample)
        watcher.start()
        try:
            process = subprocess.run(enter, stdout=subprocess.PIPE, text=True)
        finally:
            over.set()
            watcher.join()
        return process, peak, int((self.path / self._peak).read_text())


def read_ranges(ranges: Iterable[Range]) -> float:
    """Read parts of files (path, offset, bytes) that the page cache does not keep; return bytes per second."""
    buffer, total, began = mmap.mmap(-1, READ_BYTES), 0, time.perf_counter()
    with memoryview(buffer) as view:
        for path, offset, size in ranges:
            file = os.open(path, os.O_RDONLY)
            for start in range(offset, offset + size, READ_BYTES):
                count = os.preadv(file, [view[: min(READ_BYTES, offset + size - start)]], start)
                os.posix_fadvise(file, start, count, os.POSIX_FADV_DONTNEED)
                total += count
            os.close(file)
    return total / (time.perf_counter() - began)


def forget_pages(path: Path) -> None:
    """Drop a file from the page cache, where pages are charged to the group that read them first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------------------- sessions in children


def run_job(job: Job) -> Row:
    """Open a session in this process, and time it; or compile."""
    if job["session"] == "compile":
        import onnxplace

        onnxplace.compile(job["model"], **job["arguments"])
        return {}
    openings, opening_cpu, steps, rates = list[float](), list[float](), list[float](), list[float]()
    open_session, feeds = _open_bundle if job["session"] == "bundle" else _open_model, dict(np.load(job["feeds"]))
    for turn in range(max(job["turns"], 1)):
        if not turn or job.get("reopens"):
            began, cpu_before = time.perf_counter(), time.process_time()
            run, ranges, close = open_session(job)
            openings.append(time.perf_counter() - began)
            opening_cpu.append(time.process_time() - cpu_before)
        rates += [read_ranges(ranges)] if ranges else []
        outputs = run(feeds)  # the first weights arrived while the file was read, or no page of it is in the cache
        for _ in range(job["steps"]):
            began = time.perf_counter()
            outputs = run(feeds)
            steps.append(time.perf_counter() - began)
        if job.get("reopens"):
            close()
    row: Row = {"openings": openings, "opening_cpu": opening_cpu, "steps": steps, "rates": rates}
    row["step_bytes"] = sum(item[2] for item in ranges)
    if "reference" in job:
        with np.load(job["reference"]) as expected:
            pairs = [(outputs[name], expected[name]) for name in expected]
        row["is_bit_equal"] = all(np.array_equal(*pair) for pair in pairs)
        row["error"] = max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
    if "outputs" in job:
        np.savez(job["outputs"], **outputs)
    return row


Opened = tuple[Callable[[Mapping[str, Any]], dict[str, Any]], list[Range], Callable[[], None]]


def _open_model(job: Job) -> Opened:
    """Open the whole model with ONNX Runtime on all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = CORES, 4
    if job["session"] == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    data = Path(f"{job['model']}.data")
    ranges = [(str(data), 0, data.stat().st_size)] if job["reads"] else []
    return lambda feeds: dict(zip(names, session.run(None, feeds))), ranges, lambda: None


def _open_bundle(job: Job) -> Opened:
    """Open a bundle."""
    import onnxplace

    session = onnxplace.InferenceSession(job["bundle"])
    names = [item.name for item in session.get_outputs()]
    ranges = list_streamed(onnxplace.load(job["bundle"])) if job["reads"] else []
    return lambda feeds: dict(zip(names, session.run(None, feeds))), ranges, session.close


def list_streamed(bundle: Any) -> list[Range]:
    """Return path, offset and bytes of all weights that stream in a step, in the order of the segments."""
    manifest = bundle.manifest
    segments = {segment.id: segment for segment in manifest.segments}
    weights = [
        manifest.streamed[name]
        for program in manifest.programs.values()
        for step in program
        if step.op == "run"
        for name in segments[step.segment].streamed
    ]
    files = [(bundle.linked_file if item.linked else bundle.file)(item.file) for item in weights]
    return [(str(file), item.offset, item.bytes) for file, item in zip(files, weights)]


def child(job: Job, root: Path = ROOT) -> list[str]:
    """Return the command of a process with a job, with onnxplace of a folder."""
    return ["env", f"PYTHONPATH={root}", sys.executable, __file__, "child", json.dumps(dict(job))]


def run_child(job: Job, root: Path = ROOT) -> Row:
    """Run a job in a process of its own."""
    process = subprocess.run(child(job, root), check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(process.stdout.splitlines()[-1]))


# --------------------------------------------------------------------------------------------------- measured commands


def compile_bundle(path: Path, output: Path, **options: Any) -> Any:
    """Compile a model, and say so."""
    import onnxplace

    report_progress(f"compiling {output.name}")
    return onnxplace.compile(path, output, force=True, **options)


def measure_group(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row for each session of the decoder in a control group, per number of tokens."""
    from _streaming_models import SIX_GIGABYTES, SMALL_DECODER, write_model

    from onnxplace.target.parsing import parse_bytes

    limit_bytes = parse_bytes(args.group)
    with ControlGroup(limit_bytes):  # fails before work
        pass
    sizes, path = SMALL_DECODER if args.small else SIX_GIGABYTES, folder / "decoder.onnx"
    if not path.exists():
        report_progress("writing the model")
        write_model(sizes, path, np.float32)
    for tokens in args.tokens:
        files = {name: str(folder / f"{name}.npz") for name in ("feeds", "reference")}
        feeds = sizes.feeds(1, tokens, args.past)
        np.savez(files["feeds"], **dict[str, Any](feeds))
        job: Row = {"model": str(path), "bundle": str(folder / "bundle"), "feeds": files["feeds"], "steps": args.steps}
        report_progress("the reference, without a limit")
        reference = {"session": "prepacked", "reads": False, "turns": 1, "outputs": files["reference"]}
        enough = summarise([run_child({**job, **reference})])
        options = {"devices": "cpu:0", "max_memory": f"cpu:0={args.memory}", "inputs": feeds, **args.compile}
        shape = {"batch": 1, "sequence": tokens, "past": args.past}
        bundle = compile_bundle(path, folder / "bundle", shape=shape, **options)
        job |= {"reference": files["reference"], "reads": True, "turns": args.turns}
        found = {name: list[Row]() for name in ("prepacked", "mapped", "bundle")}
        for turn in range(args.rounds):
            for session in found if not turn else ("mapped", "bundle"):  # once is enough to be killed
                report_progress(f"{tokens} tokens, round {turn + 1}: {session}")
                forget_pages(path.with_name(f"{path.name}.data"))
                with ControlGroup(limit_bytes) as group:
                    found[session].append(run_in_group(group, {**job, "session": session}))
        table = {name: summarise(items) for name, items in found.items()}
        row = add_prediction(table["bundle"], bundle)
        row["speedup_mapped"] = divide(table["mapped"]["step_seconds"], row["step_seconds"])
        if "read_rate" in row:
            larger = max(row["step_bytes"] / row["read_rate"], enough["step_seconds"])
            row["overhead"] = row["step_seconds"] / larger
        titles = ("ONNX Runtime, no limit", "ONNX Runtime", "ONNX Runtime's mapping", "bundle")
        for title, item in zip(titles, (enough, *table.values())):
            yield {"tokens": str(tokens), "session": title, **item}


def run_in_group(group: ControlGroup, job: Job) -> Row:
    """Run a job in a control group; return its figures, or why there are none."""
    process, anonymous, peak = group.run(child(job))
    memory = {"anonymous_bytes": anonymous, "group_bytes": peak}
    if process.returncode:
        return {"failure": "killed" if process.returncode < 0 else f"exit code {process.returncode}", **memory}
    return {**json.loads(process.stdout.splitlines()[-1]), **memory}


def summarise(rows: Sequence[Row]) -> Row:
    """Return the medians of equal jobs, and their largest memory."""
    row: Row = {}
    for key in ("anonymous_bytes", "group_bytes"):
        row |= {key: max(item[key] for item in rows)} if key in rows[0] else {}
    if failure := next((item["failure"] for item in rows if "failure" in item), ""):
        return {**row, "step_seconds": failure}
    row["opening_seconds"] = statistics.median(second for item in rows for second in item["openings"])
    row["step_seconds"] = statistics.median(second for item in rows for second in item["steps"])
    row["steps"] = [item["steps"] for item in rows]
    if rates := [rate for item in rows for rate in item["rates"]]:
        row["step_bytes"] = rows[0]["step_bytes"]
        row["bytes_per_second"], row["read_rate"] = row["step_bytes"] / row["step_seconds"], statistics.median(rates)
        row["rates"], row["to_reading"] = rates, row["bytes_per_second"] / row["read_rate"]
    if "error" in rows[0]:
        row["error"] = max(item["error"] for item in rows)
        row["equal"] = "same bits" if all(item["is_bit_equal"] for item in rows) else f"to {row['error']:.1e}"
    return row


def add_prediction(row: Row, bundle: Any) -> Row:
    """Return a row with the bundle's predicted step, and the memory that it should take."""
    manifest = bundle.manifest
    row |= {"predicted_seconds": manifest.predicted.step_seconds, "limit_bytes": manifest.devices[0].limit_bytes}
    row |= {"peak_bytes": manifest.devices[0].peak_bytes, "pool_bytes": manifest.streams[0].pool_bytes}
    row["to_predicted"] = divide(row["predicted_seconds"], row["step_seconds"])
    return row


def measure_webgpu(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the row of a transformer whose weights are a multiple of the memory of a GPU, in turns with all of them."""
    from _large_graphs import build_transformer
    from _streaming_models import Weights

    import onnxplace
    from onnxplace.machine.hardware import find_device_problem
    from onnxplace.measure.compare import time_in_turns
    from onnxplace.target.target import Device

    if problem := find_device_problem(Device(args.device, 1)):
        raise SystemExit(f"{args.device} cannot be used here, so nothing is measured: {problem}")
    path, weights = folder / "transformer.onnx", Weights(folder / "transformer.onnx.data", np.float32)
    path.write_bytes(build_transformer(args.layers, args.width, args.rows, weights).SerializeToString())
    limit = 4 * weights.parameters // args.multiple
    feeds = {"x": np.random.default_rng(0).standard_normal((1, args.rows, args.width), np.float32)}
    options = {"devices": args.device, "shape": {"batch": 1}, "inputs": feeds}
    resident = compile_bundle(path, folder / "resident", **options)
    bundle = compile_bundle(path, folder / "bundle", max_memory=limit, **options, **args.compile)
    report_progress("verifying")
    verification = onnxplace.verify(bundle, against=path, inputs=feeds)
    row: Row = {"session": f"{args.device}, {weights.parameters * 4 / 1e6:.0f} MB"}
    row |= {
        "equal": "equal" if verification.equal else "DIFFER",
        "step_bytes": sum(r[2] for r in list_streamed(bundle)),
    }
    with onnxplace.InferenceSession(resident) as whole, onnxplace.InferenceSession(bundle) as streaming:
        upload = prepare_upload(bundle, args.device)
        calls: Row = {"computing": partial(whole.run, None, feeds), "streaming": upload}
        timings = time_in_turns({**calls, "step": partial(streaming.run, None, feeds)}, args.steps)
    row |= {f"{name}_seconds": item.median_seconds for name, item in timings.items()}
    row["overhead"] = divide(row["step_seconds"], max(row["computing_seconds"], row["streaming_seconds"]))
    np.savez(folder / "feeds.npz", **dict[str, Any](feeds))
    for name, item in {"anonymous_bytes": bundle, "resident_anonymous_bytes": resident}.items():
        job = {"session": "bundle", "bundle": str(item.path), "feeds": str(folder / "feeds.npz"), "reads": False}
        with ControlGroup(NO_LIMIT) as group:  # it only counts
            row[name] = run_in_group(group, {**job, "turns": 1, "steps": 3})["anonymous_bytes"]
    yield add_prediction(row, bundle)


UPLOAD = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[1] y) <int64[1] i = {0}> {y = Gather(x, i)}'
NO_LIMIT = 1 << 50


def prepare_upload(bundle: Any, device: str) -> Callable[[], None]:
    """Return a function that brings the weights of a step to a device, for a node that reads one number of each."""
    from onnx import parser

    from onnxplace.machine.isolated_sessions import open_session
    from onnxplace.machine.ort_sessions import make_session_options
    from onnxplace.target.device_kinds import DeviceAddress

    model = parser.parse_model(UPLOAD).SerializeToString()
    session = open_session(model, make_session_options(()), DeviceAddress.of(device))
    arrays = [np.fromfile(path, np.float32, size // 4, offset=start) for path, start, size in list_streamed(bundle)]

    def upload() -> None:
        for array in arrays:
            session.run(None, {"x": array})

    return upload


# --------------------------------------------------------------------------------------------------------- simulated


def simulate_machines(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row for each model and amount of memory of a GPU, from estimated costs; nothing runs."""
    from _streaming_models import LLAMA_3_8B, SDXL, write_model

    from onnxplace.model.loading import load
    from onnxplace.model.lowering import bind
    from onnxplace.pipeline.pipeline import Pipeline
    from onnxplace.state import State

    cases: tuple[tuple[str, Any, dict[str, int], list[float]], ...] = (
        ("SDXL's UNet, latents 128 x 128, 2 rows", SDXL, {"batch": 2}, args.unet_memory),
        ("Llama-3-8B, 1 token after 1024", LLAMA_3_8B, {"batch": 1, "sequence": 1, "past": 1024}, args.decoder_memory),
        ("Llama-3-8B, 512 tokens", LLAMA_3_8B, {"batch": 1, "sequence": 512, "past": 0}, args.decoder_memory),
    )
    for name, sizes, shape, limits in cases:
        path = folder / "model.onnx"
        write_model(sizes, path, np.float16, holes=True)
        front = Pipeline.parse("optimize{fixed_sizes=true},profile{estimate=true}")
        state = front.run(State(make_target(args)).with_facts(bind(load(path), shape, {})))[0]
        for allowed in limits:
            report_progress(f"{name}, {allowed} GiB")
            yield {"model": name, **compare_ways(state, make_target(args, allowed))}


def make_target(args: argparse.Namespace, allowed: float = 0.0) -> Any:
    """Return a GPU, of which so many GiB may be used, and the processor of its host."""
    from onnxplace.target.machines import parse_machine
    from onnxplace.target.target import Link, Target

    gpu, cpu = (parse_machine(name).to_target().devices[0] for name in (args.gpu, args.cpu))
    gpu = replace(gpu, memory_bytes=int(allowed * 2**30) or gpu.memory_bytes)
    return Target((gpu, cpu), (Link("all-to-all", "all-to-all", args.latency, args.rate, args.link),))


def compare_ways(state: Any, target: Any) -> Row:
    """Return the predicted steps of a model on a GPU that may use little of its memory.

    `one device` has room for everything. `bound` is the least of streaming alone: the larger of computing on the GPU
    and of bringing, at the link's rate, what its memory does not hold.
    """
    from onnxplace.errors import InfeasibleError
    from onnxplace.facts import Profile, Schedule, Segments, Streaming
    from onnxplace.pipeline.pipeline import Pipeline
    from onnxplace.problem import predict_single_device_seconds, predict_step_seconds

    single = Pipeline.parse("coplace{join=never},single,split").run(state)[0]
    graph, allowed = state[Profile].graph, target.devices[0].memory_bytes
    values = int(single[Schedule].simulation.peak_bytes[0]) - graph.total_weight_bytes
    row: Row = {"allowed_bytes": allowed, "weight_bytes": graph.total_weight_bytes, "value_bytes": values}
    row["one_device_seconds"] = float(predict_single_device_seconds(state)[0])
    missing = max(graph.total_weight_bytes + values - allowed, 0)
    row["bound_seconds"] = max(row["one_device_seconds"], missing / target.links[0].bytes_per_second)
    row["layer by layer"] = offload_layers(state, target, row["one_device_seconds"], allowed - values)
    limited = replace(state, target=target)
    found = {}
    for placer in ("fit", "auto", "stream"):
        with contextlib.suppress(InfeasibleError):
            found[placer] = Pipeline.parse(f"coplace{{join=never}},{placer},split").run(limited)[0]
    seconds = {placer: predict_step_seconds(item) for placer, item in found.items()}
    row["rest on the CPU"] = min((seconds[name] for name in ("fit", "auto") if name in seconds), default="does not fit")
    row["streamed"] = seconds.get("stream", "does not fit")
    if "stream" in found and Streaming in found["stream"]:
        row["streamed_bytes"] = sum(found["stream"][Streaming].weight_bytes.values())
        row["host_weight_bytes"] = int(found["stream"][Segments].simulation.weights_bytes[1])
    return row


def offload_layers(state: Any, target: Any, compute_seconds: float, room_bytes: int) -> float:
    """Return the step if each layer's weights are copied right before it runs, and the GPU waits for them.

    This is what accelerate does, by our costs: the first layers stay on the GPU as long as there is room for them and
    for the largest layer; each weight of the others is copied at the full rate of the link after its latency. What it
    takes besides that, such as copies from memory that is not page-locked, counts nothing.
    """
    from onnxplace.facts import Profile

    graph, link = state[Profile].graph, target.links[0]
    layers: dict[str, list[int]] = {}  # in the order of the model; weights outside of layers are one each
    for name, size in zip(graph.weight_names, graph.weight_bytes.tolist()):
        layers.setdefault(name.rpartition("/")[0] or name, []).append(size)
    room = room_bytes - max(map(sum, layers.values()))
    if graph.total_weight_bytes <= room_bytes:
        return compute_seconds
    seconds = compute_seconds
    for sizes in layers.values():
        room -= sum(sizes)
        if room < 0:
            seconds += sum(link.latency_seconds + size / link.bytes_per_second for size in sizes)
    return seconds


# -------------------------------------------------------------------------------------------------- before and after


def compare_versions(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row for each model with enough memory: files, opening and steps of two versions of onnxplace."""
    import models

    before = folder / "before"
    before.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", args.before], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(before)], check=True, input=archive.stdout)
    versions = {"before": before, "after": ROOT}
    for name in args.models:
        path = folder / f"{name}.onnx"
        models.save(models.build(name), path)
        for devices in ("cpu:0", "cpu:0,cpu:1"):
            report_progress(f"{name}, {devices}")
            costs = str(folder / "costs.json")
            job = {"session": "compile", "model": str(path)}
            arguments: Row = {"devices": devices, "shape": SHAPES.get(name, {}), "force": True, "trial": False}
            # By default, the memory that is free now, and a search that a busy machine cuts short.
            arguments |= {"max_memory": "4GiB", "budget_seconds": 120}
            first = {"output": str(folder / "first"), "save_costs": costs}
            run_child({**job, "arguments": {**arguments, **first}}, before)
            bundles = {version: folder / version / "bundle" for version in versions}
            for version, root in versions.items():
                bundles[version].parent.mkdir(exist_ok=True)
                options = {"output": str(bundles[version]), "costs": costs}
                run_child({**job, "arguments": {**arguments, **options}}, root)
            yield {"model": name, "devices": devices, **compare_bundles(bundles, versions, args, folder)}


SHAPES = {
    "transformer": {"batch": 2, "seq": 32},
    "decoder": {"batch": 1, "seq": 1, "past": 64},
    "two-tower": {"images": 2, "texts": 4},
}


def compare_bundles(
    bundles: Mapping[str, Path], versions: Mapping[str, Path], args: argparse.Namespace, folder: Path
) -> Row:
    """Return how the files of two bundles differ, and the medians of their openings and steps, which take turns."""
    import onnxplace
    from onnxplace.feeds.synthetic import random_feeds

    bundle = onnxplace.load(bundles["after"])
    feeds = folder / "feeds.npz"
    np.savez(feeds, **dict[str, Any](random_feeds(bundle.inputs, bundle.manifest.dimensions)))
    files = {
        version: {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for version, path in bundles.items()
    }
    names = {*files["before"], *files["after"]}
    differing = {name for name in names if files["before"].get(name) != files["after"].get(name)}
    fields = list_differing_fields(*(json.loads(files[version]["manifest.json"]) for version in ("before", "after")))
    found: dict[str, list[Row]] = {version: [] for version in versions}
    for turn in range(args.rounds):
        for version in sorted(versions, reverse=bool(turn % 2)):
            outputs = folder / f"{version}.npz"
            job: Row = {
                "session": "bundle",
                "bundle": str(bundles[version]),
                "feeds": str(feeds),
                "outputs": str(outputs),
            }
            job |= {"reads": False, "turns": args.turns, "steps": args.steps, "reopens": True}
            found[version].append(run_child(job, versions[version]))
    row: Row = {"files": f"{len(differing)} of {len(names)} DIFFER", "differing": sorted(differing), "fields": fields}
    if differing <= {"manifest.json"}:
        row["files"] = "same bits" + (f", except for fields of the manifest: {', '.join(fields)}" if differing else "")
    with np.load(folder / "before.npz") as one, np.load(folder / "after.npz") as other:
        row["equal"] = "same bits" if all(np.array_equal(one[name], other[name]) for name in one) else "DIFFER"
    # The first opening of a process loads what all need; a busy machine changes CPU seconds least.
    for key, name, skipped in (("opening_cpu", "opening CPU", 1), ("steps", "step", 0)):
        pools = [
            [second for item in found[version] for second in item[key][skipped:]] for version in ("before", "after")
        ]
        before, after = map(statistics.median, pools)
        row |= {f"{name} before": before, f"{name} after": after, f"{key}_speedup": before / after}
    return row


def list_differing_fields(before: Any, after: Any, name: str = "") -> list[str]:
    """Return the names of fields that differ; those that only one has with its sign."""
    if isinstance(before, dict) and isinstance(after, dict):
        only = [f"-{key}" for key in before.keys() - after.keys()] + [f"+{key}" for key in after.keys() - before.keys()]
        pairs = [(before[key], after[key], key) for key in before if key in after]
        return sorted({*only, *(field for pair in pairs for field in list_differing_fields(*pair))})
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return sorted({field for pair in zip(before, after) for field in list_differing_fields(*pair, name)})
    return [] if before == after else [name]


# ---------------------------------------------------------------------------------------------------------------- main

Measure = Callable[[argparse.Namespace, Path], Iterator[Row]]
COMMANDS: Mapping[str, tuple[Measure, str, tuple[str, ...]]] = {
    "group": (
        measure_group,
        "A decoder in a control group",
        ("tokens", "session", "step_seconds", "step_bytes", "bytes_per_second", "read_rate", "to_reading", "overhead",
         "speedup_mapped",
         "anonymous_bytes", "group_bytes", "predicted_seconds", "to_predicted", "equal"),
    ),
    "webgpu": (
        measure_webgpu,
        "A transformer with little memory on a GPU",
        ("session", "limit_bytes", "peak_bytes", "anonymous_bytes", "resident_anonymous_bytes", "step_bytes",
         "computing_seconds", "streaming_seconds", "step_seconds", "overhead", "predicted_seconds", "to_predicted",
         "equal"),
    ),
    "machines": (
        simulate_machines,
        "Estimated steps on a GPU that may use little of its memory",
        ("model", "allowed_bytes", "streamed_bytes", "host_weight_bytes", "one_device_seconds", "bound_seconds",
         "streamed", "rest on the CPU", "layer by layer"),
    ),
    "unchanged": (
        compare_versions,
        "Bundles with enough memory",
        ("model", "devices", "files", "equal", "opening CPU before", "opening CPU after", "opening_cpu_speedup",
         "step before", "step after", "steps_speedup"),
    ),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """Return the command and its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    child_parser = commands.add_parser("child")
    child_parser.add_argument("job", type=json.loads)
    group, webgpu, machines, unchanged = (commands.add_parser(name) for name in COMMANDS)
    for item in (group, webgpu, machines, unchanged):
        item.add_argument("--folder", type=Path, help="for models and bundles; default: a temporary one")
        item.add_argument("--keep", action="store_true", help="leave the files there, and use them in the next run")
        item.add_argument("--json", type=Path, metavar="F", help="write all figures")
    for item in (group, webgpu):
        text = "further options of `onnxplace.compile`, as JSON"
        item.add_argument("--compile", type=json.loads, default={}, metavar="OPTIONS", help=text)
    group.add_argument("--group", default="2.5GB", help="limit of the control group")
    group.add_argument("--memory", default="2GiB", help="--max-memory of the bundle")
    group.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    group.add_argument("--past", type=int, default=128)
    group.add_argument("--small", action="store_true", help="a tiny decoder, to try this benchmark")
    for item, rounds, turns, steps in ((group, 2, 2, 4), (unchanged, 4, 3, 20)):
        item.add_argument("--rounds", type=int, default=rounds, help="processes of each session, in turns")
        item.add_argument("--turns", type=int, default=turns, help="of reading, or opening, and steps in a process")
        item.add_argument("--steps", type=int, default=steps, help="of each turn")
    webgpu.add_argument("--device", default="webgpu:0")
    webgpu.add_argument("--layers", type=int, default=4)
    webgpu.add_argument("--width", type=int, default=512)
    webgpu.add_argument("--rows", type=int, default=4)
    webgpu.add_argument("--multiple", type=int, default=4, help="weights / --max-memory")
    webgpu.add_argument("--steps", type=int, default=8)
    machines.add_argument("--gpu", default="RTX-4090")
    machines.add_argument("--cpu", default="Ryzen-7950X")
    machines.add_argument("--link", default="PCIe4")
    machines.add_argument("--rate", type=float, default=31.5e9, help="bytes per second of the link, as published")
    machines.add_argument("--latency", type=float, default=20e-6)
    machines.add_argument("--unet-memory", type=float, nargs="+", default=[6, 4, 3], metavar="GIB")
    machines.add_argument("--decoder-memory", type=float, nargs="+", default=[8, 12, 16], metavar="GIB")
    unchanged.add_argument("--before", required=True, metavar="REVISION")
    unchanged.add_argument("--models", nargs="+", default=["transformer", "decoder", "two-tower", "squeezenet"])
    return parser.parse_args()


def main() -> None:
    """Run a command, and remove what it wrote."""
    args = parse_arguments()
    if args.command == "child":
        print(json.dumps(run_job(args.job)))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    measure, title, columns = COMMANDS[args.command]
    if args.keep and args.folder:
        args.folder.mkdir(exist_ok=True)
        rows = print_table(title, columns, measure(args, args.folder))
    else:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="streaming-") as folder:
            rows = print_table(title, columns, measure(args, Path(folder)))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
