from onnxplace.pipeline.pipeline import (
    Observer as Observer,
    Pipeline as Pipeline,
    Timing as Timing,
    make_pass as make_pass,
    run_pass as run_pass,
)
from onnxplace.pipeline.registry import (
    create_runtime as create_runtime,
    find_plugin as find_plugin,
    is_runtime_option as is_runtime_option,
    list_options as list_options,
)
from onnxplace.pipeline.select_placer import (
    BAECHI as BAECHI,
    OBJECTIVES as OBJECTIVES,
    USE_FEWER_DEVICES as USE_FEWER_DEVICES,
    ObjectiveName as ObjectiveName,
    choose_placer as choose_placer,
    report_idle_devices as report_idle_devices,
    require_all_devices_used as require_all_devices_used,
)
from onnxplace.pipeline.text_form import (
    PassSpec as PassSpec,
    build_pass as build_pass,
    format_pipeline as format_pipeline,
    make_spec as make_spec,
    parse_pipeline as parse_pipeline,
)
