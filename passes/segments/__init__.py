"""Segments: memory limits, boundary types, manifest."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.segments.boundary import boundary_types as boundary_types
    from onnxplace.passes.segments.carried_state import crossing as crossing, require_together as require_together
    from onnxplace.passes.segments.fill_manifest import manifest_of as manifest_of
    from onnxplace.passes.segments.memory_limits import within_limits as within_limits

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "boundary": "boundary_types",
        "carried_state": "crossing require_together",
        "fill_manifest": "manifest_of",
        "memory_limits": "within_limits",
    },
)
