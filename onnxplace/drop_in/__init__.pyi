from onnxplace.drop_in.exceptions import (
    also_raise_as as also_raise_as,
    argument_error as argument_error,
    match_onnxruntime as match_onnxruntime,
)
from onnxplace.drop_in.io_binding import IOBinding as IOBinding
from onnxplace.drop_in.run_arguments import (
    RequestChecks as RequestChecks,
    end_with_options as end_with_options,
    replace_termination as replace_termination,
    require_run_options as require_run_options,
    run_with_options as run_with_options,
    to_owned_ort_value as to_owned_ort_value,
)
from onnxplace.drop_in.session_arguments import (
    FURTHER as FURTHER,
    SessionArguments as SessionArguments,
    accept_arguments as accept_arguments,
    list_providers as list_providers,
    open_bundle as open_bundle,
    warn_ignored as warn_ignored,
)
