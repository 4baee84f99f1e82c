"""The losses of a run: as a table for other programs, and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxplace.errors import InputError, UsageError
from onnxplace.utils.files import format_path, read_text, write_file

COLUMNS = ("step", "loss", "learning_rate", "seconds")
PLOT_FORMATS = (".png", ".svg", ".pdf")
# Of runs with more steps, a picture shows every second, third, ... one.
_MAX_POINTS = 2000


class LossCurve:
    """A row per step: its number, loss, learning rate, seconds, and metrics."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def read_before(self, path: Path, step: int) -> None:
        """Take over the rows of an earlier part of the run, up to a step; a file that does not exist has none.

        Raises InputError for a file that is no loss curve.
        """
        if not path.exists():
            return
        text = read_text(path, "U031", "a loss curve (CSV)")
        try:
            rows = list(csv.DictReader(io.StringIO(text)))
            if any(None in row or None in row.values() for row in rows):
                raise ValueError("a row has more or fewer columns than the first one")
            self.rows = [dict(row) for row in rows if int(row["step"]) <= step and float(row["loss"]) is not None]
        except (KeyError, TypeError, ValueError, csv.Error):
            message = f"expected a loss curve, a CSV file with the columns {', '.join(COLUMNS)}"
            raise InputError("U031", message, where=format_path(path), hint="choose another --log") from None

    @property
    def last_step(self) -> int:
        """Return the number of the last step; 0 without any."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def add(self, step: int, loss: float, rate: float | None, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Add a step; metrics that are not scalars are left out."""
        row = {"step": str(step), "loss": repr(loss), "learning_rate": "" if rate is None else repr(rate)}
        row["seconds"] = f"{seconds:.6f}"
        row |= {name: repr(value) for name, value in metrics.items() if isinstance(value, float)}
        self.rows.append(row)

    def write(self, path: Path) -> None:
        """Write the table; raises UsageError or ExecutionError."""
        names = dict.fromkeys([*COLUMNS, *(name for row in self.rows for name in row)])
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        content = text.getvalue().encode()
        write_file(path, lambda stream: stream.write(content))

    def plot(self, path: Path, title: str) -> None:
        """Draw loss over steps; needs matplotlib."""
        from matplotlib.figure import Figure

        steps, losses = [int(row["step"]) for row in self.rows], [float(row["loss"]) for row in self.rows]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        stride = max(len(steps) // _MAX_POINTS, 1)
        axes.plot(steps[::stride], losses[::stride], linewidth=1.2, marker="." if len(steps) < 2 else "")
        axes.set(xlabel="step", ylabel="loss", title=title)
        axes.grid(visible=True, alpha=0.3)
        write_file(path, lambda stream: figure.savefig(stream, format=path.suffix[1:].lower(), dpi=120))


def require_plot_format(path: Path) -> None:
    """Raise UsageError unless a picture can be written: its format is known, and matplotlib is there."""
    if path.suffix.lower() not in PLOT_FORMATS:
        message = f"expected a file that ends with {', '.join(PLOT_FORMATS)}, got {format_path(path)}"
        raise UsageError("U032", message, where="--plot")
    try:
        import matplotlib as matplotlib
    except ImportError:
        message = "pictures need matplotlib, which is not installed"
        raise UsageError("U110", message, where="--plot", hint="pip install 'onnxplace[train]'") from None
