"""Exports of bundles: one model again, and what other programs run."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.export.exporting import export_bundle as export_bundle
    from onnxplace.export.merging import merge_bundle as merge_bundle
    from onnxplace.export.segment_models import BundleModels as BundleModels
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
