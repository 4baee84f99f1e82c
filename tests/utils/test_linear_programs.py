"""Linear programs are solved whatever HiGHS did in this process before."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
import sys
import highspy
from onnxplace.utils.linear_programs import run_highs

program = highspy.HighsLp()
program.num_col_, program.col_cost_, program.col_lower_, program.col_upper_ = 2, [1.0, 1.0], [2.0, 3.0], [9.0, 9.0]
program.integrality_ = [highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous]
sys.stdout.flush()
ours = os.dup(1)
os.dup2(2, 1)  # what HiGHS prints for the earlier run, which is not ours
earlier = highspy.Highs()
earlier.setOptionValue("threads", {threads})
earlier.passModel(program)
earlier.run()
os.dup2(ours, 1)
solver = run_highs(program, {{"random_seed": 1}})
assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal, solver.getModelStatus()
print(list(solver.getSolution().col_value))
"""


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_an_earlier_run_with_more_threads_changes_nothing(threads):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(threads=threads)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[2.0, 3.0]\n"


def test_a_first_run_prints_nothing():
    script = """
import highspy
from onnxplace.utils.linear_programs import run_highs
program = highspy.HighsLp()
program.num_col_, program.col_cost_, program.col_lower_, program.col_upper_ = 1, [1.0], [2.0], [9.0]
run_highs(program)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_an_interrupt_stops_a_program_that_takes_long():
    """A market split (Cornuéjols and Dawande 1998) of this size keeps a solver busy for hours."""
    script = """
import signal, threading
import highspy, numpy as np
from onnxplace.utils.linear_programs import run_highs

rows, columns = 6, 60
weights = np.random.default_rng(0).integers(1, 100, (rows, columns))
program = highspy.HighsLp()
program.num_col_, program.num_row_ = columns + 2 * rows, rows
program.col_cost_ = np.r_[np.zeros(columns), np.ones(2 * rows)]
program.col_lower_ = np.zeros(columns + 2 * rows)
program.col_upper_ = np.r_[np.ones(columns), np.full(2 * rows, highspy.kHighsInf)]
program.row_lower_ = program.row_upper_ = (weights.sum(axis=1) // 2).astype(float)
program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
dense = np.hstack([weights, np.eye(rows), -np.eye(rows)])
program.a_matrix_.start_ = np.r_[0, np.cumsum((dense != 0).sum(axis=1))].astype(np.int32)
program.a_matrix_.index_ = np.nonzero(dense)[1].astype(np.int32)
program.a_matrix_.value_ = dense[dense != 0]
kinds = highspy.HighsVarType
program.integrality_ = [kinds.kInteger] * columns + [kinds.kContinuous] * (2 * rows)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it
main = threading.main_thread().ident
try:
    threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    run_highs(program)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
