"""On the first host of ranks that run elsewhere: `python -m onnxplace_hosts.ranks.bridge ARGUMENTS`.

The driver starts it by the remote shell. It starts the ranks, and passes frames on between its own input and output and
the socket of rank 0. So the link between driver and ranks is that of the remote shell, and no port is opened for it.
What launcher and ranks wrote goes to stderr.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress

from onnxplace.errors import OnnxplaceError, escape_unprintable
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.ranks.launcher import REPORTING_SECONDS, Launcher, RankSocket, make_command

# In front of all frames: what a shell prints before is skipped.
GREETING = b"\0onnxplace frames\n"
# The driver says that it lives each few seconds; without that, its host or the network has failed.
ALIVE_SECONDS, MAX_SILENT_SECONDS = 5.0, 30.0
_PIECE_BYTES = 1 << 20
_INPUT, _OUTPUT = 0, 1


def _pass_on_input(connection: socket.socket) -> None:
    """Pass on what the driver sends; its end, or its silence, is the end of all ranks."""
    with suppress(OSError):
        while select.select([_INPUT], [], [], MAX_SILENT_SECONDS)[0] and (piece := os.read(_INPUT, _PIECE_BYTES)):
            connection.sendall(piece)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _pass_on_output(connection: socket.socket) -> None:
    """Pass on what rank 0 sends, until its end or that of the driver."""
    with suppress(OSError):
        while piece := connection.recv(_PIECE_BYTES):
            view = memoryview(piece)
            while len(view):
                view = view[os.write(_OUTPUT, view) :]


def _serve(launcher: Launcher, ranks: RankSocket, deadline: float) -> None:
    """Connect the driver with rank 0 until one of them ends."""

    def check() -> None:
        if not launcher.is_running or time.monotonic() > deadline:
            raise TimeoutError

    with suppress(TimeoutError):
        _, connection = ranks.accept(check)
        with connection:
            threading.Thread(target=_pass_on_input, args=(connection,), daemon=True).start()
            _pass_on_output(connection)


def main() -> None:
    """Start ranks, and pass frames on, as the argument says in JSON."""
    arguments = json.loads(sys.argv[1])
    connection = Connection(arguments["remote_shell"], arguments["interface"])
    os.write(_OUTPUT, GREETING)
    try:
        with RankSocket() as ranks:
            command = make_command(connection, arguments["counts"], ranks.path, 1)
            launcher = Launcher(command, ranks.path)
            try:
                _serve(launcher, ranks, time.monotonic() + arguments["timeout"])
                launcher.wait(REPORTING_SECONDS)
                sys.stderr.write(escape_unprintable(launcher.read_log()))
            finally:
                launcher.end(0.0)
    except OnnxplaceError as problem:
        sys.exit(str(problem).splitlines()[0])
    sys.stderr.flush()
    os._exit(0)  # a thread may still wait for input


if __name__ == "__main__":
    main()
