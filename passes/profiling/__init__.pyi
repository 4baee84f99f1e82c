from onnxplace.passes.profiling.chunks import measure_chunks as measure_chunks
from onnxplace.passes.profiling.node_errors import (
    choose_refused as choose_refused,
    measure_errors as measure_errors,
    run_nodes as run_nodes,
)
from onnxplace.passes.profiling.node_measurement import (
    Measurement as Measurement,
    MeasurementOptions as MeasurementOptions,
)
from onnxplace.passes.profiling.profile_model import (
    MAX_ALL_BYTES as MAX_ALL_BYTES,
    MAX_BYTES as MAX_BYTES,
    MAX_FIGURE as MAX_FIGURE,
    MAX_WHOLE_SECONDS as MAX_WHOLE_SECONDS,
    ModelProfiler as ModelProfiler,
    ModelStructure as ModelStructure,
    assemble_profile as assemble_profile,
    report_unknown_sizes as report_unknown_sizes,
)
from onnxplace.passes.profiling.repeated_layers import (
    find_repeats as find_repeats,
    fingerprints as fingerprints,
    node_kinds as node_kinds,
    pool_by_kind as pool_by_kind,
)
from onnxplace.passes.profiling.roofline import (
    PeakRates as PeakRates,
    count_moved_bytes as count_moved_bytes,
    count_operations as count_operations,
    device_peaks as device_peaks,
    estimate_seconds as estimate_seconds,
    measure_peaks as measure_peaks,
    typical_peaks as typical_peaks,
)
from onnxplace.passes.profiling.streamed_nodes import (
    MIN_STREAMED_BYTES as MIN_STREAMED_BYTES,
    measure_streamed as measure_streamed,
)
