"""Linear programs are solved whatever HiGHS did in this process before."""

import subprocess
import sys

import pytest

SCRIPT = """
import highspy
from onnxplace.utils import run_highs

program = highspy.HighsLp()
program.num_col_, program.col_cost_, program.col_lower_, program.col_upper_ = 2, [1.0, 1.0], [2.0, 3.0], [9.0, 9.0]
program.integrality_ = [highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous]
earlier = highspy.Highs()
earlier.setOptionValue("output_flag", False)
earlier.setOptionValue("threads", {threads})
earlier.passModel(program)
earlier.run()
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
