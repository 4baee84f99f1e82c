from onnxplace.testing.pass_contract import (
    TICK_SECONDS as TICK_SECONDS,
    check_pass as check_pass,
    random_graph as random_graph,
    random_state as random_state,
    random_target as random_target,
)
from onnxplace.testing.runtime_contract import (
    check_runtime as check_runtime,
    compile_placed as compile_placed,
    parse_model as parse_model,
)
