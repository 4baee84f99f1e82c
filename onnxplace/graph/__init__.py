"""Graphs of nodes and values on plain arrays, without ONNX."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.graph.op_graph import OpGraph as OpGraph
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
