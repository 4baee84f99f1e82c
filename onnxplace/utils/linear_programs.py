"""Linear programs, built by named blocks of columns, and solved by HiGHS on one thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxplace.utils.threads import run_in_threads

_Numbers = NDArray[np.int32]
_INFINITY = float("inf")


class LinearProgram:
    """A program that minimises a cost: columns, none of which is negative, and rows that bound sums of them.

    >>> program = LinearProgram()
    >>> bread, wine = program.add_columns(2, cost=[3.0, 5.0], upper=4.0)
    >>> program.add_rows([bread, wine], [1.0, 2.0], lower=6.0)
    >>> list(program.solve().getSolution().col_value)
    [0.0, 3.0]
    """

    def __init__(self) -> None:
        self.column_count = 0
        self._columns: list[tuple[NDArray[Any], ...]] = []
        """Per block: costs, upper bounds, and whether columns are integral."""
        self._rows: list[tuple[NDArray[Any], ...]] = []
        """Per block: lower and upper bounds, lengths."""
        self._entries: list[tuple[NDArray[Any], ...]] = []
        """Per block of rows: their columns and factors, row by row."""

    def add_columns(
        self,
        shape: int | tuple[int, ...],
        *,
        cost: ArrayLike = 0.0,
        upper: ArrayLike = _INFINITY,
        is_integral: bool = False,
    ) -> _Numbers:
        """Add a block of columns; return their numbers, in an array of its shape."""
        count = int(np.prod(shape))
        numbers = np.arange(self.column_count, self.column_count + count, dtype=np.int32).reshape(shape)
        self._columns.append(tuple(np.broadcast_to(item, numbers.shape).ravel() for item in (cost, upper, is_integral)))
        self.column_count += count
        return numbers

    def add_rows(
        self, columns: ArrayLike, factors: ArrayLike, *, lower: ArrayLike = -_INFINITY, upper: ArrayLike = _INFINITY
    ) -> None:
        """Add a row for a list of different columns, or for each list of a table; factors and bounds are broadcast."""
        table = np.atleast_2d(np.asarray(columns, dtype=np.int32))
        count, length = table.shape
        self._entries.append((table.ravel(), np.broadcast_to(factors, table.shape).ravel()))
        self._rows.append(tuple(np.broadcast_to(item, count) for item in (lower, upper, length)))

    def solve(self, options: Mapping[str, object] | None = None) -> Any:
        """Return the solver, a `highspy.Highs`, after `run_highs`."""
        import highspy

        program = highspy.HighsLp()
        cost, upper, is_integral = map(np.concatenate, zip(*self._columns))
        row_lower, row_upper, lengths = map(np.concatenate, zip(*self._rows))
        index, value = map(np.concatenate, zip(*self._entries))
        program.num_col_, program.num_row_ = self.column_count, len(lengths)
        program.col_cost_ = cost.astype(np.float64)
        program.col_lower_, program.col_upper_ = np.zeros(len(cost)), upper.astype(np.float64)
        program.row_lower_, program.row_upper_ = row_lower.astype(np.float64), row_upper.astype(np.float64)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        program.a_matrix_.index_, program.a_matrix_.value_ = index, value.astype(np.float64)
        if is_integral.any():
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[item] for item in is_integral.tolist()]
        return run_highs(program, options)


def run_highs(program: Any, options: Mapping[str, object] | None = None) -> Any:
    """Return the solver, a `highspy.Highs`, after it solved the program `highspy.HighsLp`; it prints nothing.

    HiGHS has one pool of threads per process, of the size that its first run asks for, and refuses later runs that ask
    for another size. The user's own code may have run HiGHS before. Then the size is left open, and the run takes one
    thread of the pool.

    Ctrl-C stops it within a fraction of a second.

    >>> import highspy
    >>> program = highspy.HighsLp()
    >>> program.num_col_, program.col_cost_, program.col_lower_, program.col_upper_ = 1, [1.0], [2.0], [9.0]
    >>> list(run_highs(program).getSolution().col_value)
    [2.0]
    """
    import highspy

    solver = _make_silent_solver()
    for option, value in {"threads": 1, **(options or {})}.items():
        solver.setOptionValue(option, value)
    solver.passModel(program)
    solver.HandleUserInterrupt = True
    if _run(solver) == highspy.HighsStatus.kError and solver.getModelStatus() == highspy.HighsModelStatus.kNotset:
        solver.setOptionValue("threads", 0)
        solver.setOptionValue("parallel", "off")
        _run(solver)
    return solver


def _run(solver: Any) -> Any:
    """Solve; return the status."""
    return run_in_threads([solver.run], solver.cancelSolve)[0]


def _make_silent_solver() -> Any:
    """Return a `highspy.Highs` that never writes to stdout, which belongs to our command line."""
    import highspy

    class SilentHighs(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802
            # highspy 1.16 calls this while it makes a solver, and it prints the name and version of HiGHS.
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    solver: Any = SilentHighs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    return solver
