"""What each case shares: rounds of measurement, the baseline with I/O binding, checks of outputs, and tables.

A case is a script with a `CASE`, a function `measure(settings) -> list[Table]`, and `run_case(CASE, measure)` at its
end. `--quick` takes a small model and few rounds, `--json` prints the same figures as data. `all.py` runs all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # some cases use the models of both folders
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.machine.hardware import available_cores
from onnxplace.measure.compare import compare_output, time_in_turns

Feeds = Mapping[str, NDArray[Any]]
Unit = Literal["s", "bytes", "requests/s", "count"]

QUICK_ROUNDS, ROUNDS = 5, 60
"""How often each call is measured."""
MEMORY_REQUESTS = 3
"""How many requests a process whose memory is measured runs."""


@dataclass(frozen=True)
class Case:
    """Whose case it is: public threads, and what users had there."""

    title: str
    threads: Mapping[str, str]
    """Name -> address, such as ORT#23303 -> https://github.com/microsoft/onnxruntime/issues/23303."""
    had: str
    """What the user had, in one sentence, with the figures of the thread."""


@dataclass(frozen=True)
class Settings:
    """How a case runs."""

    quick: bool
    folder: Path
    """For models and bundles; it is removed afterwards."""

    @property
    def rounds(self) -> int:
        """Return how often each call is measured."""
        return QUICK_ROUNDS if self.quick else ROUNDS

    @property
    def how(self) -> str:
        """Return how `time_calls` measures, for the caption of a table."""
        return f"medians of {self.rounds} calls, in turns"


@dataclass(frozen=True)
class Timing:
    """Times of a call in seconds: the median, and the bounds that eight of ten lie between."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One way to run the model: what was predicted, and what was measured; None for what was not."""

    what: str
    predicted: float | None = None
    measured: float | None = None
    low: float | None = None
    """Eight of ten measurements lie between this and `high`."""
    high: float | None = None
    unit: Unit = "s"
    note: str = ""
    is_bound: bool = False
    """The prediction is a lower bound, with which nothing is compared."""

    @property
    def error(self) -> float | None:
        """Return the error of the prediction as a share of what was measured: positive if it was too large."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


@dataclass(frozen=True)
class Table:
    """Rows that may be compared with each other: measured with measured ones, predicted with predicted ones."""

    caption: str
    rows: Sequence[Row]
    baseline: str = ""
    """The row that others are compared with, by a speed-up, or by a share of bytes and counts; empty for none."""
    how: str = ""
    """What a measured figure is, such as a median of how many; printed with the caption."""
    remarks: Sequence[str] = field(default=())
    """Sentences below the table that depend on what was measured, such as which devices the plan used."""


def timed_row(what: str, timing: Timing, predicted: float | None = None, note: str = "") -> Row:
    """Return the row of a measured time."""
    return Row(what, predicted, timing.seconds, timing.low, timing.high, note=note)


def time_calls(calls: Mapping[str, Callable[[], object]], settings: Settings) -> dict[str, Timing]:
    """Measure calls in turns, so that changes of the machine's speed affect all of them."""
    timings = {}
    for name, item in time_in_turns(calls, settings.rounds).items():
        low, median = float(np.quantile(item.samples, 0.1)), item.median_seconds
        timings[name] = Timing(median, min(low, median), max(item.p90_seconds, median))
    return timings


class BoundSession:
    """ONNX Runtime's session as a careful user runs it: inputs and outputs are bound once, so that no run copies any.

    Outputs keep their shapes, and `run()` returns nothing; `fetch()` returns the outputs of the last run by name. Of
    models that take strings, which ONNX Runtime cannot bind, nothing is bound.
    """

    def __init__(
        self, model: Path, feeds: Feeds, *, threads: int = 0, options: Mapping[str, Any] | None = None
    ) -> None:
        """Open the model on the CPU with so many threads, by default all cores, and further `SessionOptions`."""
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = threads
        session_options.log_severity_level = 3
        for name, value in (options or {}).items():
            setattr(session_options, name, value)
        self._session = onnxruntime.InferenceSession(model, session_options, providers=["CPUExecutionProvider"])
        self._names = [item.name for item in self._session.get_outputs()]
        self._feeds = dict(feeds)
        self._outputs: list[Any] = self._session.run(self._names, self._feeds)
        self._binding = None
        if all(array.dtype.kind in "fiub" for array in (*feeds.values(), *self._outputs)):
            self._binding = self._session.io_binding()
            for name, array in feeds.items():
                self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
            for name, array in zip(self._names, self._outputs):
                self._binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))

    def run(self) -> None:
        """Run the model once."""
        if self._binding is None:
            self._outputs = self._session.run(self._names, self._feeds)
        else:
            self._session.run_with_iobinding(self._binding)

    def fetch(self) -> dict[str, Any]:
        """Return the outputs of the last run."""
        outputs = self._outputs if self._binding is None else self._binding.copy_outputs_to_cpu()
        return dict(zip(self._names, outputs))


def check_outputs(what: str, outputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """End with an error if an output differs from that of the original model, beyond the rounding of its type."""
    for name, reference in expected.items():
        difference = compare_output(name, outputs[name], reference)
        if not difference.equal:
            raise SystemExit(
                f"{what}: output {name} differs from the original model's by {difference.max_rel_error:.2g}"
            )


def report_progress(text: str) -> None:
    """Print the current step on stderr."""
    print(text, file=sys.stderr, flush=True)


def compile_case(model: Path, name: str, settings: Settings, **options: Any) -> Bundle:
    """Compile a model, as `onnxplace.compile` with these options; with `--quick`, costs are estimates.

    The bundle is called `name`, and lies next to the model.
    """
    report_progress(f"compiling {model.stem} for {name}")
    effort = "low" if settings.quick else "default"
    output = model.with_name(f"{model.stem}-{name}.bundle".replace(" ", "-"))
    return onnxplace.compile(model, output, **{"effort": effort, "force": True, **options})


def describe_limit(limit_bytes: int, measured_bytes: float | None) -> str:
    """Return the limit of a device's memory in words, and whether what was measured exceeds it."""
    return f"limit {limit_bytes / 1e6:,.1f} MB{', exceeded' if (measured_bytes or 0) > limit_bytes else ''}"


def describe_machine() -> str:
    """Return the processor, its cores and the version of ONNX Runtime, in one sentence."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        names = [line.partition(":")[2] for line in information.read_text().splitlines() if line.startswith("model n")]
        name = names[0].strip() if names else name
    return f"{name}, {len(available_cores())} cores, ONNX Runtime {onnxruntime.__version__}"


def format_value(value: float | None, unit: Unit) -> str:
    """Format a figure in the unit of a table: ms, MB, requests a second, or a count."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:.1f} ms" if value >= 1e-2 else f"{value * 1e3:.3g} ms"
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value:,.0f} B"
    return f"{value:.3g}/s" if unit == "requests/s" else f"{value:,.0f}"


def format_table(table: Table) -> str:
    """Return a table as Markdown; columns without a figure are left out."""
    base = next((row for row in table.rows if row.what == table.baseline), None)
    columns: dict[str, list[str]] = {
        "": [row.what for row in table.rows],
        "predicted": [f"{'at least ' * row.is_bound}{format_value(row.predicted, row.unit)}" for row in table.rows],
        "measured": [_format_measured(row) for row in table.rows],
        "error": ["-" if row.error is None else f"{row.error:+.0%}" for row in table.rows],
        "compared": [_compare(row, base) for row in table.rows],
        "note": [row.note or "-" for row in table.rows],
    }
    kept = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    caption = f"{table.caption} ({table.how})" if table.how else table.caption
    lines = [f"{caption}:", "", f"| {' | '.join(kept)} |", f"|{'---|' * len(kept)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*kept.values())]
    return "\n".join((*lines, *(text for remark in table.remarks for text in ("", remark))))


def _format_measured(row: Row) -> str:
    text = format_value(row.measured, row.unit)
    if row.low is None or row.high is None:
        return text
    scale = 1e3 if row.unit == "s" else 1.0
    return f"{text} ({row.low * scale:.3g} to {row.high * scale:.3g})"


def _compare(row: Row, base: Row | None) -> str:
    """Return how many times as fast as the baseline a row is; of bytes and counts, their share of the baseline's.

    A row that was only predicted is not compared with a baseline that was only measured.
    """
    if base is None or row.unit != base.unit or row.is_bound:
        return "-"
    of_row, of_base = row.measured, base.measured
    if of_base is None:
        of_row, of_base = row.predicted, base.predicted
    if not of_row or not of_base:
        return "-"
    if row.unit in ("bytes", "count"):
        return f"{of_row / of_base:.0%}"
    return f"{of_base / of_row if row.unit == 's' else of_row / of_base:.2f}x"


def parse_tables(text: str) -> list[Table]:
    """Return the tables of a case that ran with `--json`."""
    return [Table(**{**item, "rows": [Row(**row) for row in item["rows"]]}) for item in json.loads(text)["tables"]]


def run_case(case: Case, measure: Callable[[Settings], list[Table]]) -> None:
    """Run a case as the command line asks, and print its tables."""
    parser = argparse.ArgumentParser(description=f"{case.title}: {case.had} ({', '.join(case.threads.values())})")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, in seconds and bytes")
    options = parser.parse_args()
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > 0.5:
        report_progress(f"other programs keep {load:.1f} cores busy: measured times will be too long")
    with tempfile.TemporaryDirectory() as folder:
        tables = measure(Settings(options.quick, Path(folder)))
    if options.json:
        record = {**asdict(case), "machine": describe_machine(), "tables": [asdict(table) for table in tables]}
        print(json.dumps(record, indent=1))
        return
    print(f"# {case.title} ({', '.join(case.threads)})\n\n{case.had}\n\nMeasured on {describe_machine()}.")
    for table in tables:
        print(f"\n{format_table(table)}")
