"""Real architectures, compiled and verified: python benchmarks/zoo.py [MODEL ...] [--exporters dynamo,torchscript].

torch exports models of the transformers library with random weights. They are compiled for two and three CPU devices
with several placers, one of them random, and compared with the unsplit model, with the sizes of the export and with
others: as `onnxplace verify` does, and bit for bit without the optimisations of ONNX Runtime. It also opens the export
`ort-layers` of each bundle. Needs
`pip install -e '.[cpu,dev,zoo]'`, and no network. docs/zoo.md holds the latest table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from runpy import run_path
from time import perf_counter
from unittest import mock

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np

# For modules that benchmarks share with each other and with tests.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _tables import report_progress
from _zoo_models import EXPORTERS, ZOO, Architecture, export

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import available_cores, local_target
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.measure import compare
from onnxplace.measure.compare import compare_outputs, open_reference
from onnxplace.measure.step_inputs import StateCarrier
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.runtimes.execution import segments
from onnxplace.target.target import Link, Target

SHARDED = {
    "shard": "shard{{ways={0},exact=true}}",
    "shard-least": "shard{{ways={0},exact=true,weights=least}}",
}
"""Instead of a placer: operators split over all devices, for the least step and for the fewest weights on a device."""
RANDOM = "random"
"""The placer that draws a device for each node and an order."""
PLACERS = ("auto", "m-etf", RANDOM)
SHARDED_TOLERANCE = 1e-4
"""Largest difference of a sharded model with optimisation off, relative to the largest magnitude of the output."""
LATENCY_SECONDS = 1e-6
"""Cost of a transfer and of a segment for placers, so small that they split these small models."""
Calls = Sequence[Mapping[str, Array]]
"""Inputs of consecutive calls; only the first holds states."""


@dataclass(frozen=True)
class Result:
    """The outcome of a model on a number of devices with one placer."""

    model: str
    exporter: str
    nodes: int
    devices: int
    placer: str
    problem: str = ""
    """The error; empty if the bundle computes the outputs of the model."""
    segments: int = 0
    transfers: int = 0
    error: float = 0.0
    """The largest over all outputs and sizes, relative to the largest magnitude of the output."""
    exact: bool = False
    """Whether all bits are equal with ONNX Runtime's optimisation off."""
    seconds: float = 0.0
    """Time to compile and verify."""


def main() -> int:
    """Print the table; return 1 if a model that ONNX Runtime runs does not compile or verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of: {', '.join(ZOO)}; default: all")
    parser.add_argument("--exporters", default=",".join(EXPORTERS), help="of torch: %(default)s")
    parser.add_argument("--devices", default="2,3", metavar="N,...", help="numbers of CPU devices")
    parser.add_argument("--placers", default=",".join(PLACERS), help=f"or {', '.join(SHARDED)}; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="keep exported models here, and take those that are there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    options = parser.parse_args()
    if unknown := sorted({*options.models} - {*ZOO}):
        parser.error(f"no such model: {', '.join(unknown)}")
    counts, placers = [int(count) for count in options.devices.split(",")], options.placers.split(",")
    heading = ["model", "exporter", "nodes", "devices", *placers, "largest difference", "optimisation off", "seconds"]
    print(f"| {' | '.join(heading)} |\n|{'---|' * len(heading)}", flush=True)
    results: list[Result] = []
    folder = options.folder or Path(tempfile.mkdtemp(prefix="onnxplace-zoo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.models or ZOO:
            for exporter in [item for item in options.exporters.split(",") if item in ZOO[name].exporters]:
                results += _check_and_print(name, exporter, folder, counts, placers)
    finally:
        if not options.folder:
            shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=1))
    return report(results)


def _check_and_print(
    name: str, exporter: str, folder: Path, counts: Sequence[int], placers: Sequence[str]
) -> list[Result]:
    """Export and check a model; print a row for each number of devices."""
    report_progress(f"{name}, {exporter}")
    path, architecture = folder / f"{name}.{exporter}.onnx", ZOO[name]
    try:
        if not path.exists():
            export(architecture, exporter, path)  # type: ignore[arg-type]
    except ModuleNotFoundError as problem:
        sys.exit(f"{problem}: pip install -e '.[cpu,dev,zoo]'")
    except Exception as problem:  # noqa: BLE001 - torch raises whatever its parts raise
        return _print_problem(name, exporter, f"not exported: {_shorten_error(problem)}", len(placers))
    runs = [list(calls(architecture, number)) for number in range(len(architecture.sizes))]
    if refused := plainly(path, runs):
        return _print_problem(name, exporter, f"ONNX Runtime: {refused}", len(placers))
    found = []
    for count in counts:
        row = [
            check(path, name, exporter, count, placer, runs, architecture.states, folder / "bundle")
            for placer in placers
        ]
        cells = [r.problem or f"{r.segments} / {r.transfers}" for r in row]
        about = [name, exporter, str(row[0].nodes), str(count)]
        exact = "equal" if all(r.exact for r in row) else "-"
        sums = [f"{max(r.error for r in row):.1e}", exact, f"{sum(r.seconds for r in row):.1f}"]
        print(f"| {' | '.join([*about, *cells, *sums])} |", flush=True)
        found += row
    return found


def _print_problem(name: str, exporter: str, why: str, placers: int) -> list[Result]:
    print(f"| {name} | {exporter} | {why} |{' |' * (placers + 4)}", flush=True)
    return []


def report(found: Sequence[Result]) -> int:
    """Print the total; return 1 if something is wrong, 2 if nothing was tried."""
    wrong = [result for result in found if result.problem]
    print(f"\n{len(found) - len(wrong)} of {len(found)} bundles compute what their models compute")
    return 1 if wrong else 0 if found else 2


def calls(architecture: Architecture, number: int, count: int = 3) -> Iterator[dict[str, Array]]:
    """Yield the inputs of a call with `sizes[number]`, or, of a model with states, of several in a row."""
    first = architecture.feeds(number)
    yield first
    if not architecture.states:
        return
    kept = [name for name in architecture.inputs if name.startswith("past_key_values.")]
    for step in range(1, count):
        later = architecture.feeds(number, step)
        yield {name: array for name, array in later.items() if name not in kept}


def plainly(path: Path, runs: Sequence[Calls]) -> str:
    """Return why a model cannot be a reference; empty if it can."""
    try:
        session = open_session(path, make_session_options(available_cores()), where=str(path))
        outputs = [session.run(None, dict(run[0])) for run in runs]
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return _shorten_error(problem)
    numbers = [np.asarray(value) for made in outputs for value in made]
    if not all(np.isfinite(value).all() and value.any() for value in numbers):
        return "an output is not finite, or all zeros"
    return ""


def check(
    path: Path,
    name: str,
    exporter: str,
    devices: int,
    placer: str,
    runs: Sequence[Calls],
    states: Sequence[str],
    folder: Path,
) -> Result:
    """Compile a model with a placer and verify it with several runs."""
    start, nodes = perf_counter(), 0
    try:
        bundle = compiled(path, devices, placer, runs[0][0], states, folder)
        manifest = bundle.manifest
        nodes = sum(segment.nodes for segment in manifest.segments)
        differences = compared(bundle, path, runs)
        bits = compared_unoptimised(bundle, path, runs)
        require_layers_open(bundle, folder.with_name("layers"))
    except Exception as problem:  # noqa: BLE001 - any exception is a result
        return Result(
            model=name, exporter=exporter, nodes=nodes, devices=devices, placer=placer, problem=_shorten_error(problem)
        )
    unequal = [output for output, error in differences.items() if error == float("inf")]
    problem_text = f"differs: {', '.join(unequal)}" if unequal else ""
    # Split operators add sums in another order.
    limit = SHARDED_TOLERANCE if placer in SHARDED else 0.0
    if not unequal and any(error > limit for error in bits.values()):
        problem_text = f"differs with optimisation off: {', '.join(output for output in bits if bits[output])}"
    return Result(
        model=name,
        exporter=exporter,
        nodes=nodes,
        devices=devices,
        placer=placer,
        problem=problem_text,
        segments=len(manifest.segments),
        transfers=manifest.transfers,
        error=max(differences.values()),
        exact=not any(bits.values()),
        seconds=perf_counter() - start,
    )


def compiled(
    path: Path, devices: int, placer: str, feeds: Mapping[str, Array], states: Sequence[str], folder: Path
) -> Bundle:
    """Compile a model for the sizes of these inputs; raises OnnxplaceError."""
    common = {"target": _make_target(devices), "inputs": feeds, "state": states, "force": True}
    if placer in SHARDED:
        shard = SHARDED[placer].format(devices)
        text = f"optimize,profile{{estimate=true}},{shard},coplace{{join=never}},m-etf,split,emit"
        return onnxplace.compile(path, folder, pipeline=text, **common)  # type: ignore[arg-type]
    if placer != RANDOM:
        return onnxplace.compile(path, folder, placer=placer, **common)  # type: ignore[arg-type]
    from tests.support.random_placements import RandomPlacement

    random = np.random.default_rng(0)
    drawn = RandomPlacement(tuple(random.integers(0, devices, 97).tolist()), tuple(random.integers(0, 9, 89).tolist()))
    before, after = Pipeline.parse("optimize,profile{estimate=true},coplace{join=never}"), Pipeline.parse("split,emit")
    steps = Pipeline((*before.passes, drawn, *after.passes))
    return onnxplace.compile(path, folder, pipeline=steps, **common)  # type: ignore[arg-type]


def _make_target(devices: int) -> Target:
    """Return the CPU devices of this machine with very fast links."""
    local = local_target(",".join(f"cpu:{index}" for index in range(devices)))
    cheap = tuple(replace(device, segment_seconds=LATENCY_SECONDS) for device in local.devices)
    links = tuple(Link(a.id, b.id, LATENCY_SECONDS, 1e10) for a in cheap for b in cheap if a is not b)
    return replace(local, devices=cheap, links=links)


def require_layers_open(bundle: Bundle, folder: Path) -> None:
    """Export a bundle for one session, and open it; raises ValueError unless all nodes are where they were asked to."""
    onnxplace.export_bundle(bundle, "ort-layers", folder, force=True)
    session = run_path(str(folder / "session.py"))["open_session"](folder)
    providers = {group.ep_name for group in session.get_provider_graph_assignment_info()}
    if providers != {"CPUExecutionProvider"}:
        raise ValueError(f"ort-layers: nodes are on {providers}")


def compared_unoptimised(bundle: Bundle, path: Path, runs: Sequence[Calls]) -> dict[str, float]:
    """Compare as `compared`, with one core and no fusion: only the split can change bits."""
    plain = partial(make_session_options, level="none")
    with (
        mock.patch.object(segments, "make_session_options", plain),
        mock.patch.object(compare, "make_session_options", plain),
    ):
        return compared(bundle, path, runs, available_cores()[:1])


def compared(bundle: Bundle, path: Path, runs: Sequence[Calls], cores: Sequence[int] | None = None) -> dict[str, float]:
    """Return the largest relative error of each output over all runs, infinite if it is over the tolerance.

    The unsplit model runs on `cores`, by default on all.
    """
    names = [item.name for item in bundle.outputs]
    errors = dict.fromkeys(names, 0.0)
    reference = StateCarrier(open_reference(bundle, path, cores or available_cores()), bundle)
    with onnxplace.InferenceSession(bundle) as session:
        for feeds in (feeds for run in runs for feeds in run):
            for item in compare_outputs(
                lambda arrays: session.submit(arrays, names).result().outputs, reference, feeds, names
            ):
                errors[item.name] = max(errors[item.name], item.max_rel_error if item.equal else float("inf"))
    return errors


def _shorten_error(problem: Exception) -> str:
    """Return the first line of an error, shortened for a table."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:200].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
