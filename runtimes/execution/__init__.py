"""Run a bundle's segments on threads of this process."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.runtimes.execution.engine import Engine as Engine
    from onnxplace.runtimes.execution.futures import ResultFuture as ResultFuture
    from onnxplace.runtimes.execution.segments import PlacedDevice as PlacedDevice, open_segment as open_segment
    from onnxplace.runtimes.execution.wait_list import WaitList as WaitList

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "engine": "Engine",
        "futures": "ResultFuture",
        "segments": "PlacedDevice open_segment",
        "wait_list": "WaitList",
    },
)
