"""From a model to a bundle, and from a cost graph to a placement."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.driver.compiler import (
        Compiled as Compiled,
        CompileOptions as CompileOptions,
        compile_model as compile_model,
    )
    from onnxplace.driver.placer import (
        Grouping as Grouping,
        Placed as Placed,
        evaluate as evaluate,
        place as place,
        read_placement as read_placement,
        with_devices as with_devices,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "compiler": "CompileOptions Compiled compile_model",
        "placer": "Grouping Placed evaluate place read_placement with_devices",
    },
)
