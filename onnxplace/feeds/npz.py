"""Outputs as an .npz file: the names that it can hold, and how it is written."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxplace.errors import FeedError
from onnxplace.feeds.feeds import Declared
from onnxplace.utils import write_file

# What a zip file has room for in its header, and what numpy appends to each name.
MAX_NAME_BYTES = (1 << 16) - 1
SUFFIX = ".npy"
_HINT = "rename it in the model, or fetch it in Python: onnxplace.InferenceSession(bundle).run(None, feeds)"


def require_storable(outputs: Sequence[Declared]) -> None:
    """Raise FeedError if a file cannot hold these outputs such that `numpy.load` gives each back by its name."""
    owner: dict[str, str] = {}
    for item in outputs:
        where = f"output {item.name[:80]!r}"
        if "\0" in item.name:
            raise FeedError("F010", "a zip file cannot hold a name with NUL in it", where=where, hint=_HINT)
        if (size := len(f"{item.name}{SUFFIX}".encode())) > MAX_NAME_BYTES - _part_bytes(item):
            message = f"its name has {size - len(SUFFIX)} bytes, more than a zip file has room for"
            raise FeedError("F010", message, where=where, hint=_HINT)
        for name in _claimed(item):
            if (first := owner.setdefault(name, item.name)) != item.name:
                raise _clash(item.name, first)
    for listed in filter(_is_list, outputs):
        for item in outputs:
            if _is_part(item.name, listed.name):
                raise _clash(item.name, listed.name)


def _claimed(item: Declared) -> Iterator[str]:
    """Yield the names under which `numpy.load` finds an output, as zip files on all systems spell them."""
    name = item.name.replace("\\", "/")
    yield name
    yield f"{name}{SUFFIX}"


def _is_list(item: Declared) -> bool:
    """Return whether an output may be a list, whose elements are stored as `name.0`, `name.1`."""
    return not item.dtype.startswith("tensor(")


def _part_bytes(item: Declared) -> int:
    """Return the bytes to keep free for the number of an element."""
    return 20 if _is_list(item) else 0


def _is_part(name: str, of: str) -> bool:
    """Return whether an element of the list `of` could be stored under this name.

    >>> _is_part("x.0", "x"), _is_part("x.y", "x")
    (True, False)
    """
    prefix, name = of.replace("\\", "/") + ".", name.replace("\\", "/")
    return name.startswith(prefix) and re.fullmatch(rf"\d+({re.escape(SUFFIX)})?", name[len(prefix) :]) is not None


def _clash(name: str, other: str) -> FeedError:
    message = f"in an .npz file its name, or that of its elements, is the same as that of output {other[:80]!r}"
    return FeedError("F010", message, where=f"output {name[:80]!r}", hint=_HINT)


def write_npz(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write outputs by name, whatever the names are; sequences as one array per element, `name.0`, `name.1`.

    An empty sequence and an optional that holds nothing leave no trace. Raises UsageError if it cannot be written.
    """
    arrays: dict[str, Any] = {}
    for name, value in outputs.items():
        parts = {f"{name}.{i}": part for i, part in enumerate(value)} if isinstance(value, list) else {name: value}
        arrays |= {key: np.asarray(part) for key, part in parts.items() if part is not None}

    def fill(stream: BinaryIO) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for key, array in arrays.items():
                text = array.astype(str) if array.dtype == object else array
                with archive.open(f"{key}{SUFFIX}", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, text, allow_pickle=False)

    write_file(path, fill)
