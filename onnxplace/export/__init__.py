"""Exports of bundles: one model again, and what other programs run."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.export.exporting import (
        FORMATS as FORMATS,
        Exported as Exported,
        export_bundle as export_bundle,
    )
    from onnxplace.export.merging import (
        MergedModel as MergedModel,
        describe_merged as describe_merged,
        merge_bundle as merge_bundle,
    )
    from onnxplace.export.options import ExportOptions as ExportOptions

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "exporting": "Exported FORMATS export_bundle",
        "merging": "MergedModel describe_merged merge_bundle",
        "options": "ExportOptions",
    },
)
