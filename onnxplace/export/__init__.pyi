from onnxplace.export.exporting import (
    FORMATS as FORMATS,
    Exported as Exported,
    ExportOptions as ExportOptions,
    export_bundle as export_bundle,
)
from onnxplace.export.merging import (
    MergedModel as MergedModel,
    describe_merged as describe_merged,
    merge_bundle as merge_bundle,
)
