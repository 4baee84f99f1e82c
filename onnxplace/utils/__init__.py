"""Helpers for all other rooms: files, file locks, compiled loops, processes, progress, names, linear programs."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.utils.docstrings import read_field_docs as read_field_docs
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
