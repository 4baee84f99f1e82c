"""Arrays in .npz files: read inputs, write outputs, and check that a file can hold their names."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxplace.errors import FeedError, InputError, format_one_line
from onnxplace.feeds.feeds import Array, Declared
from onnxplace.utils.files import open_input, write_file

# The header of a zip file has 16 bits for the length of a name.
MAX_NAME_BYTES = (1 << 16) - 1
# The number of a list's element, in decimal digits, and the dot before it.
_NUMBER_BYTES = 20
# numpy appends it to each name.
SUFFIX = ".npy"
# A larger archive is read only if it is not packed much smaller than it is: arrays are never packed that well.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 1 << 30, 100
# The first bytes of a .npy file, which holds a single array, and of a zip file.
_NPY_MAGIC, _ZIP_MAGIC = b"\x93NUMPY", b"PK"
_HINT = "rename it in the model, or fetch it in Python: onnxplace.InferenceSession(bundle).run(None, feeds)"


def require_storable(outputs: Sequence[Declared]) -> None:
    """Raise FeedError unless `numpy.load` can return each of these outputs by its name."""
    owner: dict[str, str] = {}
    for item in outputs:
        where = f"output {item.name[:80]!r}"
        if "\0" in item.name:
            raise FeedError("U032", "a zip file cannot hold a name with NUL in it", where=where, hint=_HINT)
        max_bytes = MAX_NAME_BYTES - len(SUFFIX) - (_NUMBER_BYTES if _is_list(item) else 0)
        if (size := len(item.name.encode())) > max_bytes:
            message = f"expected a name of at most {max_bytes} bytes, got {size} bytes"
            raise FeedError("U032", message, where=where, hint=_HINT)
        plain = item.name.replace("\\", "/")  # as zip files have it
        for name in (plain, f"{plain}{SUFFIX}"):  # `numpy.load` finds it by both
            if (first := owner.setdefault(name, item.name)) != item.name:
                raise _name_conflict_error(item.name, first)
    for sequence in filter(_is_list, outputs):
        for item in outputs:
            if _is_element_name(item.name, sequence.name):
                raise _name_conflict_error(item.name, sequence.name)


def _is_list(item: Declared) -> bool:
    """Return whether an output may be a list, with elements stored as `name.0`, `name.1`."""
    return not item.dtype.startswith("tensor(")


def _is_element_name(name: str, list_name: str) -> bool:
    """Return whether an element of a list output could be stored under this name.

    >>> _is_element_name("x.0", "x"), _is_element_name("x.y", "x")
    (True, False)
    """
    prefix, name = list_name.replace("\\", "/") + ".", name.replace("\\", "/")
    return name.startswith(prefix) and re.fullmatch(rf"\d+({re.escape(SUFFIX)})?", name[len(prefix) :]) is not None


def _name_conflict_error(name: str, other: str) -> FeedError:
    """Return the error for two outputs whose names conflict in the file."""
    message = f"in an .npz file, it or its elements would have the same name as output {other[:80]!r}"
    return FeedError("U032", message, where=f"output {name[:80]!r}", hint=_HINT)


def write_npz(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write outputs by name; a sequence becomes one array per element, `name.0`, `name.1`.

    The names may have any characters. Empty sequences and empty optionals are left out. Raises UsageError if the file
    cannot be written.
    """
    arrays: dict[str, Any] = {}
    for name, value in outputs.items():
        is_list = isinstance(value, list)
        elements = {f"{name}.{i}": element for i, element in enumerate(value)} if is_list else {name: value}
        arrays |= {key: np.asarray(element) for key, element in elements.items() if element is not None}

    def fill(stream: BinaryIO) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for key, array in arrays.items():
                plain = array.astype(str) if array.dtype == object else array
                if plain.dtype.isbuiltin == 2:  # a type of ml_dtypes, which numpy may write but not read
                    plain = plain.view(f"V{plain.dtype.itemsize}")
                with archive.open(f"{key}{SUFFIX}", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, plain, allow_pickle=False)

    write_file(path, fill)


def read_npz(path: str | Path) -> dict[str, Array]:
    """Read arrays by name from an .npz file; raises FeedError naming the file.

    Nothing in the file is executed: arrays of objects are refused.

    >>> read_npz("inputs.npz")["tokens"].shape  # doctest: +SKIP
    (1, 128)
    """
    hint = "write it with numpy.savez(path, input_name=array)"
    try:
        with io.BufferedReader(open_input(path, "F006")) as stream:
            return _read_arrays(stream)
    except InputError as problem:
        raise FeedError("F006", problem.message, where=problem.where, hint=hint) from None
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError as problem:
        reason = "it holds objects, not plain arrays" if "allow_pickle" in str(problem) else format_one_line(problem)
    except MemoryError:
        reason = "an array in it is too large for this machine's memory"
    except Exception as problem:  # noqa: BLE001 - numpy, zipfile and decompressors raise errors of many types
        reason = f"it is cut off or damaged ({format_one_line(problem)})"
    raise FeedError("F006", f"not an .npz file of plain arrays: {reason}", where=str(path), hint=hint)


def _read_arrays(stream: BinaryIO) -> dict[str, Array]:
    """Read the arrays of an archive; raises ValueError for another kind of file."""
    magic = stream.read(len(_NPY_MAGIC))
    if magic == _NPY_MAGIC:
        raise ValueError("it is one array without a name (.npy)")
    if not magic.startswith(_ZIP_MAGIC):
        raise ValueError("it is another kind of file" if magic else "it is empty")
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as archive:
        _require_bounded(archive.zip.infolist(), stream.seek(0, os.SEEK_END))
        return {name: archive[name] for name in archive.files}


def _require_bounded(members: Sequence[zipfile.ZipInfo], packed_bytes: int) -> None:
    """Raise ValueError for an archive that was made to fill the memory: no arrays are packed that small."""
    size = sum(member.file_size for member in members)
    if size > max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * packed_bytes):
        raise ValueError(f"its {packed_bytes} bytes expand to {size}")
