"""The command line."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cli.app import entry as entry, main as main
    from onnxplace.cli.completion import BUNDLE_PATH as BUNDLE_PATH
    from onnxplace.cli.shared_options import (
        seed_option as seed_option,
        shape_option as shape_option,
        with_machine as with_machine,
        with_operator_libraries as with_operator_libraries,
        with_runtime as with_runtime,
    )
    from onnxplace.cli.terminal import (
        as_json as as_json,
        print_json as print_json,
        print_text as print_text,
        show_progress as show_progress,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
