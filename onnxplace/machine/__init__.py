"""Devices, ONNX Runtime sessions, timing and cached measurements of this machine."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.machine import measurement_cache as measurement_cache
    from onnxplace.machine.guarded_session import GuardedSession as GuardedSession
    from onnxplace.machine.hardware import (
        RUNTIME_BYTES as RUNTIME_BYTES,
        assign_cores as assign_cores,
        available_cores as available_cores,
        available_memory_bytes as available_memory_bytes,
        describe_machine as describe_machine,
        find_device_problem as find_device_problem,
        find_hardware as find_hardware,
        find_link_technology as find_link_technology,
        list_accelerators as list_accelerators,
        local_target as local_target,
        require_device as require_device,
    )
    from onnxplace.machine.interrupts import (
        interruptible as interruptible,
        prepare_interrupts as prepare_interrupts,
        register_ending_handler as register_ending_handler,
    )
    from onnxplace.machine.refusals import LIBRARY_HINT as LIBRARY_HINT, find_disk_full as find_disk_full
    from onnxplace.machine.repeated_runs import (
        BUSY_WAITING_SHARE as BUSY_WAITING_SHARE,
        DOUBTFUL_WAITING_SHARE as DOUBTFUL_WAITING_SHARE,
        MAX_CREDIBLE_WAITING_SHARE as MAX_CREDIBLE_WAITING_SHARE,
        MIN_RUNS as MIN_RUNS,
        RepeatPolicy as RepeatPolicy,
        Runs as Runs,
    )
    from onnxplace.machine.run_delay import longest_wait as longest_wait, read_run_delays as read_run_delays
    from onnxplace.machine.sessions import (
        end_openings as end_openings,
        is_foreign_error as is_foreign_error,
        list_operator_libraries as list_operator_libraries,
        make_session_options as make_session_options,
        open_session as open_session,
        pin_thread as pin_thread,
        require_interpreter as require_interpreter,
        run_whole_model as run_whole_model,
        use_custom_operators as use_custom_operators,
        uses_optimisations as uses_optimisations,
        without_optimisations as without_optimisations,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "measurement_cache": "",
        "guarded_session": "GuardedSession",
        "hardware": (
            "RUNTIME_BYTES assign_cores available_cores available_memory_bytes describe_machine find_device_problem "
            "find_hardware find_link_technology list_accelerators local_target require_device"
        ),
        "interrupts": "interruptible prepare_interrupts register_ending_handler",
        "refusals": "LIBRARY_HINT find_disk_full",
        "repeated_runs": (
            "BUSY_WAITING_SHARE DOUBTFUL_WAITING_SHARE MAX_CREDIBLE_WAITING_SHARE MIN_RUNS RepeatPolicy Runs"
        ),
        "run_delay": "longest_wait read_run_delays",
        "sessions": (
            "end_openings is_foreign_error list_operator_libraries make_session_options open_session pin_thread "
            "require_interpreter run_whole_model use_custom_operators uses_optimisations without_optimisations"
        ),
    },
)
