"""The rates at which weights arrive: from a file, and from the host's memory on a device."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from onnxplace.machine.hardware import find_measurement_obstacle
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.measurement_cache import key, processor, read, write
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.repeated_runs import RepeatPolicy
from onnxplace.target.catalogue import read_catalogue
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device, Target, default_link

READ_PIECE_BYTES = 16 << 20
"""Of a file, which are read at once."""
# A file is read for this time, and its rate is that of its filesystem if it has more than some pieces.
READ_SECONDS, MAX_READ_BYTES, MIN_SHARED_BYTES = 0.3, 1 << 30, 4 * READ_PIECE_BYTES
# What is copied to a device, and how often.
COPY_BYTES, COPIES = 64 << 20, 5
# Disks and links are shared with others, and change: rates are kept for a day.
MAX_AGE_SECONDS = 24 * 3600.0
_UPLOAD = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[1] y) <int64[1] i = {0}> {y = Gather(x, i)}'


def measure_read_rate(path: Path) -> float:
    """Return the bytes per second with which one thread reads a file from its disk, piece after piece.

    Reads go through the page cache, which drops the pages before and behind. A file of at least `MIN_SHARED_BYTES`
    stands for all of its filesystem, for a day. Raises OSError if it cannot be read.
    """
    status, measure = path.stat(), partial(_read_pieces, path)
    return _recall(("read", str(status.st_dev)), measure) if status.st_size >= MIN_SHARED_BYTES else measure()


def _read_pieces(path: Path) -> float:
    buffer, total_bytes, seconds = bytearray(READ_PIECE_BYTES), 0, 0.0
    with path.open("rb", buffering=0) as file:
        with suppress(OSError):  # pages that are not yet written cannot be dropped
            os.fsync(file.fileno())
        drop_pages(file.fileno(), 0, 0)
        began = time.perf_counter()
        while seconds < READ_SECONDS and total_bytes < MAX_READ_BYTES:
            count, position = file.readinto(buffer), file.tell()
            drop_pages(file.fileno(), position - count, count)
            if not count:
                file.seek(0)
            total_bytes, seconds = total_bytes + count, time.perf_counter() - began
    return total_bytes / seconds


def drop_pages(descriptor: int, offset: int, size: int) -> None:
    """Let the page cache drop a range of an open file, up to its end for a size of 0; only some systems do."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def find_host_rate(target: Target, device: Device) -> float:
    """Return the bytes per second from the memory of a device's host to the device.

    A link of the target counts first, if it gives one from a processor of that host. Then what copies take on this
    machine, where the runtime copies as it is measured here: in the host's memory, and to devices that only sessions
    reach. Then what is published of PCIe for the device's model, then the default of links with such devices.
    """
    pairs = {(item.id, device.id) for item in target.devices if item.is_host and item.host == device.host}
    pairs -= set(target.list_assumed_links())
    links = [link for link in target.with_all_links().links if (link.source, link.destination) in pairs]
    if links:
        return max(link.bytes_per_second for link in links)
    kind = find_kind(device.kind)
    is_copied_alike = kind.lock is not None or kind.shares_memory(device.address.index)
    if is_copied_alike and find_measurement_obstacle(device) is None:
        return _recall(("copy", device.cost_class, device.id), partial(_copy, device))
    catalogue = read_catalogue()
    names = {name for item in catalogue.devices.values() if item.model == device.model for name in item.fabrics}
    published = [catalogue.fabrics[name].bytes_per_second for name in names if catalogue.fabrics[name].family == "PCIe"]
    return max(published, default=default_link(device, device).bytes_per_second)


def _copy(device: Device) -> float:
    values = np.ones(COPY_BYTES // 4, dtype=np.float32)
    if find_kind(device.kind).shares_memory(device.address.index):
        copy: Callable[[], object] = partial(np.copyto, np.empty_like(values), values)
    else:
        from onnx import parser

        model = parser.parse_model(_UPLOAD).SerializeToString()
        session = open_session(model, make_session_options(()), device.address)
        copy = partial(session.run, None, {"x": values})
    copy()
    return COPY_BYTES / RepeatPolicy(COPIES, 0.0, 0.0).run(copy, pool=False)[0].seconds


def _recall(subject: Iterable[str], measure: Callable[[], float]) -> float:
    """Return the rate of a subject that was measured less than a day ago, or measure it."""
    name = key(("rate", processor(), *subject))
    with suppress(ValueError):  # a damaged entry is removed
        match read(name):
            case {"bytes_per_second": float(rate), "measured_at": float(then)} if 0 < rate < math.inf:
                if 0 <= time.time() - then < MAX_AGE_SECONDS:
                    return rate
    rate = measure()
    with suppress(ValueError):  # a cache that cannot be written only costs time
        write(name, {"bytes_per_second": rate, "measured_at": time.time()})
    return rate
