"""Remove what identifies a machine or its users from texts that are sent to others."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# An absolute path of two parts or more; ids of devices such as cuda:0/1, and units such as MiB/s, have a character
# before their slash.
_PATH = re.compile(r"(?<![\w.:/<>)])(?:/[^\s/:'\",;()\[\]]+){2,}/?|\b[A-Za-z]:[\\/][^\s:'\",;()\[\]]+")
# Shorter names are part of too many words.
MIN_NAME_CHARACTERS = 3


def hide_private(value: Any) -> Any:
    """Return plain data whose texts have no paths, host names and user names; keys of mappings stay.

    >>> hide_private({"detail": "cannot open /data/secret/model.onnx"})
    {'detail': 'cannot open <path>'}
    """
    if isinstance(value, str):
        return _hide_in_text(value)
    if isinstance(value, Mapping):
        return {key: hide_private(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_private(item) for item in value]
    return value


def _hide_in_text(text: str) -> str:
    for folder in _list_folders():
        text = re.sub(re.escape(folder) + r"[^\s:'\",;()\[\]]*", "<path>", text)
    text = _PATH.sub("<path>", text)
    for name, replacement in _list_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", replacement, text, flags=re.IGNORECASE)
    return text


@cache
def _list_folders() -> tuple[str, ...]:
    """Return folders whose names may have spaces, the longest first."""
    folders = {tempfile.gettempdir(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])}
    with suppress(OSError, RuntimeError):
        folders |= {str(Path.home()), os.getcwd()}
    return tuple(sorted((folder for folder in folders if len(Path(folder).parts) > 1), key=len, reverse=True))


@cache
def _list_names() -> tuple[tuple[str, str], ...]:
    """Return the names of this machine and its user, each with what replaces it."""
    hosts = {platform.node(), socket.gethostname()}
    hosts |= {host.partition(".")[0] for host in hosts}
    users = set()
    with suppress(OSError, KeyError, ImportError, RuntimeError):
        users = {getpass.getuser(), Path.home().name}
    named = [*((host, "<host>") for host in sorted(hosts)), *((user, "<user>") for user in sorted(users))]
    # The longest first, so that nothing is left of a name that another one begins.
    named.sort(key=lambda pair: (-len(pair[0]), pair))
    return tuple((name, replacement) for name, replacement in named if len(name) >= MIN_NAME_CHARACTERS)
