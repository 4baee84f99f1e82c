"""Passes by name, their text form, and running them in a row."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.pipeline.pipeline import (
        Observer as Observer,
        Pipeline as Pipeline,
        Timing as Timing,
        make_pass as make_pass,
        run_pass as run_pass,
    )
    from onnxplace.pipeline.registry import entries as entries, find as find
    from onnxplace.pipeline.select_placer import (
        BAECHI as BAECHI,
        FEWER_DEVICES as FEWER_DEVICES,
        OBJECTIVES as OBJECTIVES,
        Objective as Objective,
        choose_placer as choose_placer,
        require_all_used as require_all_used,
        unused_devices as unused_devices,
    )
    from onnxplace.pipeline.text_form import (
        PassSpec as PassSpec,
        build_pass as build_pass,
        format_pipeline as format_pipeline,
        parse_pipeline as parse_pipeline,
        spec_of as spec_of,
        tuple_text as tuple_text,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "pipeline": "Observer Pipeline Timing make_pass run_pass",
        "registry": "entries find",
        "select_placer": ("BAECHI FEWER_DEVICES OBJECTIVES Objective choose_placer require_all_used unused_devices"),
        "text_form": "PassSpec build_pass format_pipeline parse_pipeline spec_of tuple_text",
    },
)
