"""Run a bundle's segments on threads of this process."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.runtimes.execution.bound_memory import BoundMemory as BoundMemory
    from onnxplace.runtimes.execution.engine import Engine as Engine
    from onnxplace.runtimes.execution.futures import Outcome as Outcome, ResultFuture as ResultFuture
    from onnxplace.runtimes.execution.host_memory import HostMemory as HostMemory
    from onnxplace.runtimes.execution.routes import open_routes as open_routes
    from onnxplace.runtimes.execution.segments import PlacedDevice as PlacedDevice
    from onnxplace.runtimes.execution.wait_list import WaitList as WaitList

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "bound_memory": "BoundMemory",
        "engine": "Engine",
        "host_memory": "HostMemory",
        "routes": "open_routes",
        "futures": "Outcome ResultFuture",
        "segments": "PlacedDevice",
        "wait_list": "WaitList",
    },
)
