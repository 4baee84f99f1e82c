"""What nodes cost: measured with ONNX Runtime, or estimated."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.profiling.cached_measurements import keep as keep, key as key, recall as recall
    from onnxplace.passes.profiling.chunks import (
        cut as cut,
        measure_pieces as measure_pieces,
        needed_bytes as needed_bytes,
    )
    from onnxplace.passes.profiling.node_work import bytes_moved as bytes_moved, operations as operations
    from onnxplace.passes.profiling.plausible import (
        MOST_ALL_BYTES as MOST_ALL_BYTES,
        MOST_BYTES as MOST_BYTES,
        MOST_FIGURE as MOST_FIGURE,
        MOST_WHOLE_SECONDS as MOST_WHOLE_SECONDS,
    )
    from onnxplace.passes.profiling.repeated_layers import (
        fingerprints as fingerprints,
        node_kinds as node_kinds,
        pooled as pooled,
        repeats as repeats,
    )
    from onnxplace.passes.profiling.roofline import (
        PEAKS as PEAKS,
        Peaks as Peaks,
        estimate as estimate,
        measured_peaks as measured_peaks,
    )
    from onnxplace.passes.profiling.timer import Feeds as Feeds, Measurement as Measurement, Timer as Timer

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "cached_measurements": "keep key recall",
        "chunks": "cut measure_pieces needed_bytes",
        "node_work": "bytes_moved operations",
        "plausible": "MOST_ALL_BYTES MOST_BYTES MOST_FIGURE MOST_WHOLE_SECONDS",
        "repeated_layers": "fingerprints node_kinds pooled repeats",
        "roofline": "PEAKS Peaks estimate measured_peaks",
        "timer": "Feeds Measurement Timer",
    },
)
