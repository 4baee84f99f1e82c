from onnxplace.serving.batched_session import (
    BatchedSession as BatchedSession,
    Batching as Batching,
    check_in_flight as check_in_flight,
    check_timeout as check_timeout,
    open_serving_session as open_serving_session,
    require_batching as require_batching,
)
from onnxplace.serving.streams import stream_results as stream_results
