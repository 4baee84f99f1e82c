"""Learning curves: rows of a CSV file, and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from onnxplace.errors import InputError
from onnxplace.utils import format_path, read_text, write_file


@dataclass(frozen=True)
class Plotted:
    """A point of a learning curve; kinds of trainings add numbers of their own."""

    UNIT: ClassVar[str] = ""
    """What the vertical axis of the plot shows."""
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The fields that are plotted, with their labels; the first one is the strongest line."""

    updates: int
    seconds: float
    """Of training, evaluations included."""


@dataclass(frozen=True)
class CurvePoint(Plotted):
    """The state of a training after some updates."""

    UNIT: ClassVar[str] = "step, as a share of one device"
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "validation_cost": "unseen graphs",
            "start_cost": "unseen graphs, start",
            "train_cost": "training, at the end",
            "train_best_cost": "training, best",
        }
    )

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


def write_curve(path: Path, points: Sequence[Plotted], kind: type[Plotted] = CurvePoint) -> None:
    """Write a learning curve as CSV, with the fields of `kind` as columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(item.name for item in fields(kind))
    writer.writerows(asdict(point).values() for point in points)
    write_file(path, lambda file: file.write(text.getvalue().encode()))


def read_curve(path: Path, kind: type[Any] = CurvePoint) -> list[Any]:
    """Read a learning curve of points of this kind.

    Raises InputError if it is not one.
    """
    where = format_path(path)
    rows = list(csv.reader(read_text(path, "H012", "a learning curve").splitlines()))
    try:
        if not rows or rows[0] != [item.name for item in fields(kind)]:
            raise ValueError("it has other columns")
        # Annotations are texts.
        types = [int if item.type == "int" else float for item in fields(kind)]
        return [kind(*(convert(text) for convert, text in zip(types, row, strict=True))) for row in rows[1:]]
    except (ValueError, TypeError) as problem:
        hint = "omit --resume to start anew"
        raise InputError("H012", f"not the learning curve of a policy ({problem})", where=where, hint=hint) from None


def plot_curve(path: Path, points: Sequence[Plotted], title: str) -> bool:
    """Write a learning curve as PNG; return False if matplotlib is not installed or there are no points."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not points:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(title=title, xlabel="seconds of training", ylabel=points[0].UNIT)
    seconds = [point.seconds for point in points]
    for index, (name, label) in enumerate(points[0].LINES.items()):
        axes.plot(seconds, [getattr(point, name) for point in points], label=label, alpha=0.6 if index else 1.0)
    axes.legend()
    write_file(path, lambda stream: figure.savefig(stream, format="png", metadata={"Software": None}))
    return True
