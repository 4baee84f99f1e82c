"""Inputs of a model: declared types and sizes, checks, generated values, .npz files."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.feeds.feeds import Declared as Declared, numpy_type as numpy_type
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
