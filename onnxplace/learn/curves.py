"""Learning curves: rows of a CSV file, and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from onnxplace.errors import InputError
from onnxplace.utils import format_path, read_text, write_file


@dataclass(frozen=True)
class CurvePoint:
    """The state of a training after some updates."""

    updates: int
    seconds: float
    """Of training, evaluations included."""
    episodes: int
    train_cost: float
    """Mean cost at the ends of the episodes since the last point; 1 is all work on one device."""
    train_best_cost: float
    """Mean cost of the best placements that they visited."""
    entropy: float
    """Mean, of the choices."""
    validation_cost: float
    """Geometric mean cost of the best visited placement of graphs that are not trained on, without further episodes."""
    start_cost: float
    """The same of the placements that episodes start from."""


def write_curve(path: Path, points: Sequence[CurvePoint]) -> None:
    """Write a learning curve as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(item.name for item in fields(CurvePoint))
    writer.writerows(asdict(point).values() for point in points)
    write_file(path, lambda file: file.write(text.getvalue().encode()))


def read_curve(path: Path) -> list[CurvePoint]:
    """Read a learning curve.

    Raises InputError if it is not one.
    """
    where = format_path(path)
    rows = list(csv.reader(read_text(path, "H012", "a learning curve").splitlines()))
    try:
        if not rows or rows[0] != [item.name for item in fields(CurvePoint)]:
            raise ValueError("it has other columns")
        return [_read_point(row) for row in rows[1:]]
    except (ValueError, TypeError) as problem:
        hint = "omit --resume to start anew"
        raise InputError("H012", f"not the learning curve of a policy ({problem})", where=where, hint=hint) from None


def _read_point(row: Sequence[str]) -> CurvePoint:
    updates, seconds, episodes, *numbers = row
    return CurvePoint(int(updates), float(seconds), int(episodes), *map(float, numbers))


def plot_curve(path: Path, points: Sequence[CurvePoint], title: str) -> bool:
    """Write a learning curve as PNG; return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(title=title, xlabel="seconds of training", ylabel="step, as a share of one device")
    seconds = [point.seconds for point in points]
    axes.plot(seconds, [point.train_cost for point in points], label="training, at the end", alpha=0.5)
    axes.plot(seconds, [point.train_best_cost for point in points], label="training, best", alpha=0.5)
    axes.plot(seconds, [point.validation_cost for point in points], label="unseen graphs")
    axes.plot(seconds, [point.start_cost for point in points], "--", label="unseen graphs, start")
    axes.legend()
    write_file(path, lambda stream: figure.savefig(stream, format="png", metadata={"Software": None}))
    return True
