from onnxplace.serving.batched_session import (
    BatchedSession as BatchedSession,
    open_serving_session as open_serving_session,
)
from onnxplace.serving.batching_options import (
    Batching as Batching,
    check_in_flight as check_in_flight,
    check_timeout as check_timeout,
    require_batching as require_batching,
)
from onnxplace.serving.streams import stream_results as stream_results
