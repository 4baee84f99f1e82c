"""Run a bundle's segments on threads of this process, and follow the programs of devices."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.runtimes.execution.bound_memory import BoundMemory as BoundMemory
    from onnxplace.runtimes.execution.engine import Engine as Engine
    from onnxplace.runtimes.execution.host_memory import HostMemory as HostMemory
    from onnxplace.runtimes.execution.sessions import EngineSession as EngineSession
    from onnxplace.runtimes.execution.workers import Worker as Worker
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
