from onnxplace.passes.segments.compile_segments import KnownValues as KnownValues
from onnxplace.passes.segments.cut_segments import (
    cut_into_segments as cut_into_segments,
    describe_segments as describe_segments,
    merge_segments as merge_segments,
    report_crossing_states as report_crossing_states,
    require_states_together as require_states_together,
    write_programs as write_programs,
)
from onnxplace.passes.segments.memory_limits import (
    cut_within_limits as cut_within_limits,
    simulate_segments as simulate_segments,
)
from onnxplace.passes.segments.segment_predictions import (
    predict_bundle as predict_bundle,
    predict_devices as predict_devices,
    predict_routes as predict_routes,
)
from onnxplace.passes.segments.streamed_blocks import cut_blocks as cut_blocks
from onnxplace.passes.segments.write_segments import write_bundle_files as write_bundle_files
