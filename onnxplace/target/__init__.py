"""Devices and links, for which placements are computed, and their text forms."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.target.parsing import parse_devices as parse_devices
    from onnxplace.target.target import Device as Device, Link as Link, Pool as Pool, Shared as Shared, Target as Target
    from onnxplace.target.target_file import read_target as read_target
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
