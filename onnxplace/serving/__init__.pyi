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
from onnxplace.serving.served_models import (
    Limits as Limits,
    ServedModel as ServedModel,
    ServedModels as ServedModels,
    require_servable as require_servable,
)
from onnxplace.serving.server import (
    format_address as format_address,
    listen as listen,
    require_server_packages as require_server_packages,
    run_server as run_server,
)
from onnxplace.serving.streams import stream_results as stream_results
