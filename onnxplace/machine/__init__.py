"""Devices, ONNX Runtime sessions, timing and cached measurements of this machine."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.machine.hardware import local_target as local_target
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
