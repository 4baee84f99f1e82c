"""Contract tests for plugins, and random states to try them on."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.testing.pass_contract import (
        check_pass as check_pass,
        random_graph as random_graph,
        random_state as random_state,
        random_target as random_target,
    )
    from onnxplace.testing.runtime_contract import (
        check_runtime as check_runtime,
        compile_placed as compile_placed,
        parse_model as parse_model,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
