from onnxplace.drop_in.exceptions import also_raise_as as also_raise_as, match_onnxruntime as match_onnxruntime
from onnxplace.drop_in.io_binding import IOBinding as IOBinding
from onnxplace.drop_in.run_arguments import (
    RequestChecks as RequestChecks,
    end_with_options as end_with_options,
    replace_termination as replace_termination,
    require_run_options as require_run_options,
    run_with_options as run_with_options,
)
from onnxplace.drop_in.session_arguments import (
    FURTHER as FURTHER,
    SessionArguments as SessionArguments,
    accept_arguments as accept_arguments,
    open_bundle as open_bundle,
)
from onnxplace.drop_in.session_methods import NodeArg as NodeArg, SessionMethods as SessionMethods
