from onnxplace.export.exporting import (
    Exported as Exported,
    ExportOptions as ExportOptions,
    export_bundle as export_bundle,
    note_routes as note_routes,
    require_one_host as require_one_host,
)
from onnxplace.export.merging import (
    MergedModel as MergedModel,
    describe_merged as describe_merged,
    merge_bundle as merge_bundle,
)
from onnxplace.export.segment_models import (
    BundleModels as BundleModels,
    SegmentModel as SegmentModel,
    list_producers as list_producers,
    write_segment_files as write_segment_files,
)
