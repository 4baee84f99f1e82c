"""Linear programs are solved whatever HiGHS did in this process before."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
import sys
import highspy
from onnxplace.utils import run_highs

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
from onnxplace.utils import run_highs
program = highspy.HighsLp()
program.num_col_, program.col_cost_, program.col_lower_, program.col_upper_ = 1, [1.0], [2.0], [9.0]
run_highs(program)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
