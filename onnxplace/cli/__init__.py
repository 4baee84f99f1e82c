"""The command line."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cli.app import entry as entry, main as main

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "app": "entry main",
    },
)
