"""Segments: memory limits, boundary types, manifest."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.segments.boundary import infer_boundary_types as infer_boundary_types
    from onnxplace.passes.segments.carried_state import (
        report_crossing_states as report_crossing_states,
        require_states_together as require_states_together,
    )
    from onnxplace.passes.segments.fill_manifest import build_manifest as build_manifest
    from onnxplace.passes.segments.memory_limits import cut_within_limits as cut_within_limits

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "boundary": "infer_boundary_types",
        "carried_state": "report_crossing_states require_states_together",
        "fill_manifest": "build_manifest",
        "memory_limits": "cut_within_limits",
    },
)
