from onnxplace.runtimes.execution.bound_memory import BoundMemory as BoundMemory
from onnxplace.runtimes.execution.compiled_wait import (
    NotifyAndWait as NotifyAndWait,
    compile_function as compile_function,
)
from onnxplace.runtimes.execution.device_streams import DeviceTensor as DeviceTensor, StreamValue as StreamValue
from onnxplace.runtimes.execution.engine import (
    END_GRACE_SECONDS as END_GRACE_SECONDS,
    WEIGHTS_PART as WEIGHTS_PART,
    Engine as Engine,
)
from onnxplace.runtimes.execution.failures import describe_step_failure as describe_step_failure
from onnxplace.runtimes.execution.futures import Outcome as Outcome, ResultFuture as ResultFuture, WaitList as WaitList
from onnxplace.runtimes.execution.host_memory import HostMemory as HostMemory
from onnxplace.runtimes.execution.programs import (
    Condition as Condition,
    ProgramLoop as ProgramLoop,
    drop_last_frees as drop_last_frees,
)
from onnxplace.runtimes.execution.requests import (
    CancelledError as CancelledError,
    CarriedStates as CarriedStates,
    Request as Request,
)
from onnxplace.runtimes.execution.segments import (
    Fallback as Fallback,
    OpenRoute as OpenRoute,
    OpenSegment as OpenSegment,
    PlacedDevice as PlacedDevice,
    find_cores as find_cores,
    open_routes as open_routes,
)
from onnxplace.runtimes.execution.sessions import EngineSession as EngineSession
from onnxplace.runtimes.execution.wakeups import count_pauses as count_pauses, exchanges_often as exchanges_often
from onnxplace.runtimes.execution.workers import Worker as Worker, WorkerThread as WorkerThread
