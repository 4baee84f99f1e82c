"""The machine at hand: its devices, ONNX Runtime sessions, undisturbed timing, kept measurements."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.machine import measurement_cache as measurement_cache
    from onnxplace.machine.hardware import (
        RUNTIME_BYTES as RUNTIME_BYTES,
        Gpu as Gpu,
        available_memory_bytes as available_memory_bytes,
        core_sets as core_sets,
        cores as cores,
        cuda_problem as cuda_problem,
        describe as describe,
        gpus as gpus,
        link_via as link_via,
        local_target as local_target,
        one_node_model as one_node_model,
        onnxruntime as onnxruntime,
        require_cuda as require_cuda,
    )
    from onnxplace.machine.interrupts import ends_runs as ends_runs, interruptible as interruptible, prepare as prepare
    from onnxplace.machine.refusals import LIBRARY_HINT as LIBRARY_HINT, no_space as no_space
    from onnxplace.machine.repeated_runs import (
        BUSY as BUSY,
        DOUBT as DOUBT,
        LEAST_RUNS as LEAST_RUNS,
        MOST_WAITED as MOST_WAITED,
        Patience as Patience,
        Runs as Runs,
    )
    from onnxplace.machine.run_delay import longest as longest, waits as waits
    from onnxplace.machine.sessions import (
        custom_operators as custom_operators,
        end_openings as end_openings,
        is_foreign as is_foreign,
        open_session as open_session,
        operator_libraries as operator_libraries,
        pinned as pinned,
        require_interpreter as require_interpreter,
        run_whole as run_whole,
        session_options as session_options,
        unoptimised as unoptimised,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "measurement_cache": "",
        "hardware": (
            "Gpu RUNTIME_BYTES available_memory_bytes core_sets cores cuda_problem describe gpus link_via "
            "local_target one_node_model onnxruntime require_cuda"
        ),
        "interrupts": "ends_runs interruptible prepare",
        "refusals": "LIBRARY_HINT no_space",
        "repeated_runs": "BUSY DOUBT LEAST_RUNS MOST_WAITED Patience Runs",
        "run_delay": "longest waits",
        "sessions": (
            "custom_operators end_openings is_foreign open_session operator_libraries pinned require_interpreter "
            "run_whole session_options unoptimised"
        ),
    },
)
