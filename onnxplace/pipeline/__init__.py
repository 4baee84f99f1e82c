"""Passes by name, their text form, and running them in a row."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.pipeline.pipeline import Pipeline as Pipeline, make_pass as make_pass
    from onnxplace.pipeline.registry import find_plugin as find_plugin
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
