"""Contract tests for plugins, and random states to try them on."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.testing.pass_contract import (
        TICK_SECONDS as TICK_SECONDS,
        check_pass as check_pass,
        random_graph as random_graph,
        random_state as random_state,
        random_target as random_target,
    )
    from onnxplace.testing.runtime_contract import check_runtime as check_runtime

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "pass_contract": "TICK_SECONDS check_pass random_graph random_state random_target",
        "runtime_contract": "check_runtime",
    },
)
