from onnxplace.passes.streaming.source_program import (
    MEMORY_MARGIN as MEMORY_MARGIN,
    choose_sources as choose_sources,
)
from onnxplace.passes.streaming.streamable_weights import StreamableWeights as StreamableWeights
from onnxplace.passes.streaming.streamed_placement import (
    apply_choice as apply_choice,
    describe_choice as describe_choice,
    predict_step as predict_step,
)
