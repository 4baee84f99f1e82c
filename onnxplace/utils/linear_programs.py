"""Linear programs, solved by HiGHS on one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.utils.threads import run_in_threads


def make_program(
    cost: Sequence[float] | NDArray[Any],
    column_bounds: tuple[Sequence[float] | NDArray[Any], Sequence[float] | NDArray[Any]],
    row_bounds: tuple[Sequence[float] | NDArray[Any], Sequence[float] | NDArray[Any]],
    rows: tuple[Sequence[int] | NDArray[Any], Sequence[int] | NDArray[Any], Sequence[float] | NDArray[Any]],
) -> Any:
    """Return the program `highspy.HighsLp` that minimises a cost; bounds are pairs of lower and upper ones.

    `rows` has the matrix by rows: where each row starts, the columns, and their factors.
    """
    import highspy

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(cost), len(row_bounds[0])
    program.col_cost_ = np.asarray(cost, dtype=np.float64)
    program.col_lower_, program.col_upper_ = (np.asarray(bound, dtype=np.float64) for bound in column_bounds)
    program.row_lower_, program.row_upper_ = (np.asarray(bound, dtype=np.float64) for bound in row_bounds)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_, program.a_matrix_.index_ = (np.asarray(part, dtype=np.int32) for part in rows[:2])
    program.a_matrix_.value_ = np.asarray(rows[2], dtype=np.float64)
    return program


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
