"""Programs that stand for ssh: they run commands here, or fail as ssh does."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

# Skips options and takes the host's name, as ssh does.
HEADER = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'


@pytest.fixture
def write_shell(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a remote shell; `$host` is the host, and `$*` the command."""

    def write(body: str) -> str:
        path = tmp_path / "remote-shell"
        path.write_text(f"{HEADER}{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


@pytest.fixture
def local_shell(write_shell: Callable[[str], str]) -> str:
    """Return a remote shell whose hosts are all this machine."""
    return write_shell('exec sh -c "$*"')
