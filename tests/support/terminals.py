"""Commands on a terminal of their own."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable


def run_on_terminal(
    *arguments: str,
    until: str = "",
    act: Callable[[subprocess.Popen], object] = lambda child: None,
    environment: dict[str, str] | None = None,
    seconds: float = 300.0,
) -> tuple[str, int]:
    """Run onnxplace on a terminal, and act once it has printed a text; return all that it showed, and its exit code."""
    terminal, end = pty.openpty()
    inherited = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "FORCE_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-m", "onnxplace", *arguments], stdin=end, stdout=end, stderr=end, start_new_session=True,
        env={**inherited, "TERM": "xterm", "COLUMNS": "100", **(environment or {})},
    )  # fmt: skip
    os.close(end)
    shown, began = b"", time.monotonic()
    with child:
        while time.monotonic() - began < seconds:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
            if until and until.encode() in shown:
                act(child)
                until = ""
        else:
            child.kill()
    os.close(terminal)
    return shown.decode(), child.returncode
