"""Ctrl-C ends a command, and leaves no files."""

import signal
import sys
import time
from pathlib import Path

import pytest

from onnxplace.cli import app
from tests.support.bad_input import SHAPE, contents, run_script
from tests.support.fault_checks import HUNG_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a single process there")
def test_ctrl_c_while_profiling_leaves_nothing(model_file):
    folder = model_file.parent
    # A tolerance of 0: otherwise it stops as soon as it is sure, and may have ended before Ctrl-C.
    pipeline = "optimize,profile{repeat=1000000000,seconds=3600,tolerance=0},m-etf,split,emit"
    process = run_script(folder, "compile", model_file, *SHAPE, "--pipeline", pipeline)
    wait_until(lambda: any((folder / "tmp").iterdir()) or process.poll() is not None)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HUNG_SECONDS)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "interrupted; nothing half-written was left"
    assert set(contents(folder)) == {"model.onnx", "tmp"}


def test_ctrl_c_while_writing_leaves_nothing(run_cli, model_file, scratch, fast_pipeline, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupt)
    result = run_cli("compile", model_file, *SHAPE, "--pipeline", fast_pipeline)
    assert (result.code, result.out) == (130, "")
    assert set(contents(model_file.parent)) == {"model.onnx"}


def test_an_interrupt_that_a_destructor_drops_is_repeated(monkeypatch):
    class Dropping:
        def __del__(self):
            raise KeyboardInterrupt

    def drop() -> None:
        Dropping()
        wait_until(lambda: False)  # not one long sleep: the interrupt is not a signal that would end it

    monkeypatch.setattr(sys, "unraisablehook", app._repeat_interrupt)
    with pytest.raises(KeyboardInterrupt):
        drop()
