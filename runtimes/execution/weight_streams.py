"""Bring the weights of segments that stream to their devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, SegmentRecord
from onnxplace.feeds import numpy_type
from onnxplace.runtimes.execution.segments import PlacedDevice


def read_block(bundle: Bundle, record: SegmentRecord, device: PlacedDevice) -> dict[str, Any]:
    """Return the weights of a segment that stream, as values on its device."""
    values = {}
    for name in record.streamed:
        weight = bundle.manifest.streamed[name]
        path = (bundle.linked_file if weight.linked else bundle.file)(weight.file)
        element = numpy_type(weight.dtype)
        assert element is not None
        array = np.fromfile(path, element, weight.bytes // element.itemsize, offset=weight.offset)
        values[name] = device.memory.feed(array.reshape(weight.shape), weight.dtype)
    return values
