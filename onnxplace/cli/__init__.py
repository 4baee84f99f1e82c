"""The command line."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cli.app import entry as entry, main as main
    from onnxplace.cli.terminal import as_json as as_json, print_json as print_json, print_text as print_text
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
