"""Signals that come while the command line is still being imported: until it has its own handlers.

This is imported before anything that takes time. In a process that runs something else, it does nothing.
"""

import os
import sys

_JSON = b'{\n "error": {\n  "code": "X011",\n  "message": "%s",\n  "where": "",\n  "hint": ""\n }\n}\n'


def _end(number: int, _: object) -> None:
    message = b"interrupted" if number == 2 else b"interrupted (SIGTERM)"
    try:
        os.write(2, message + b"; nothing half-written was left\n")
        if "--json" in sys.argv:
            os.write(1, _JSON % message)
    finally:
        os._exit(128 + number)


_script = os.path.basename((*getattr(sys, "argv", ()), "")[0]).removesuffix(".exe")
# Whether this process was started for a command.
IS_COMMAND = _script == "onnxplace" or (_script == "-m" and "onnxplace" in sys.orig_argv)
if IS_COMMAND:
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise it is ignored
        signal.signal(signal.SIGINT, _end)
        signal.signal(signal.SIGTERM, _end)
