from onnxplace.passes.streaming.homes_program import choose_homes as choose_homes
from onnxplace.passes.streaming.streamable_weights import (
    StreamableWeights as StreamableWeights,
    apply_choice as apply_choice,
    describe_choice as describe_choice,
    predict_step as predict_step,
)
