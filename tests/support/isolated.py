"""The processes of isolated devices, and their crashes."""

import psutil
import pytest

from onnxplace.machine.isolated_sessions import IsolatedSession


def list_children() -> list[psutil.Process]:
    """Return the processes of devices that this one has started."""
    children = psutil.Process().children()
    return [child for child in children if any("run_job" in word for word in child.cmdline())]


def crash_at_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the one process of a device end by SIGKILL right before the next run there."""
    run = IsolatedSession.run

    def crash(self, names, given, options=None):
        monkeypatch.setattr(IsolatedSession, "run", run)
        (process,) = list_children()
        process.kill()
        return run(self, names, given, options)

    monkeypatch.setattr(IsolatedSession, "run", crash)
