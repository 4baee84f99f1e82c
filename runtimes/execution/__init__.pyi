from onnxplace.runtimes.execution.bound_memory import BoundMemory as BoundMemory
from onnxplace.runtimes.execution.carried_state import CarriedStates as CarriedStates
from onnxplace.runtimes.execution.engine import Engine as Engine
from onnxplace.runtimes.execution.failures import describe_step_failure as describe_step_failure
from onnxplace.runtimes.execution.futures import Outcome as Outcome, ResultFuture as ResultFuture
from onnxplace.runtimes.execution.host_memory import HostMemory as HostMemory
from onnxplace.runtimes.execution.programs import ProgramLoop as ProgramLoop, drop_last_frees as drop_last_frees
from onnxplace.runtimes.execution.requests import CancelledError as CancelledError, Request as Request
from onnxplace.runtimes.execution.routes import OpenRoute as OpenRoute, open_routes as open_routes
from onnxplace.runtimes.execution.segments import (
    OpenSegment as OpenSegment,
    PlacedDevice as PlacedDevice,
    open_segment as open_segment,
)
from onnxplace.runtimes.execution.sessions import EngineSession as EngineSession
from onnxplace.runtimes.execution.stream_values import DeviceTensor as DeviceTensor, StreamValue as StreamValue
from onnxplace.runtimes.execution.wait_list import WaitList as WaitList
from onnxplace.runtimes.execution.workers import Worker as Worker
