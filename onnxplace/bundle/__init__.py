"""Bundles: the manifest, the files, and how they are written and checked."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import Bundle as Bundle
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
