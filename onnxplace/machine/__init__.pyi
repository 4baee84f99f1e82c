from onnxplace.machine import measurement_cache as measurement_cache
from onnxplace.machine.hardware import (
    RUNTIME_BYTES as RUNTIME_BYTES,
    assign_cores as assign_cores,
    available_cores as available_cores,
    available_memory_bytes as available_memory_bytes,
    describe_machine as describe_machine,
    describe_optimiser as describe_optimiser,
    find_device_problem as find_device_problem,
    find_hardware as find_hardware,
    find_link_technology as find_link_technology,
    find_measurement_obstacle as find_measurement_obstacle,
    list_accelerators as list_accelerators,
    local_target as local_target,
    require_device as require_device,
    resolve_device as resolve_device,
)
from onnxplace.machine.interrupts import (
    interruptible as interruptible,
    prepare_interrupts as prepare_interrupts,
    register_ending_handler as register_ending_handler,
)
from onnxplace.machine.isolated_sessions import (
    DeviceProcess as DeviceProcess,
    IsolatedSession as IsolatedSession,
    find_processes as find_processes,
    list_taken_nodes as list_taken_nodes,
    open_session as open_session,
)
from onnxplace.machine.ort_sessions import (
    GuardedSession as GuardedSession,
    Level as Level,
    end_openings as end_openings,
    is_foreign_error as is_foreign_error,
    list_operator_libraries as list_operator_libraries,
    make_session_options as make_session_options,
    open_in_threads as open_in_threads,
    pin_thread as pin_thread,
    require_interpreter as require_interpreter,
    use_custom_operators as use_custom_operators,
    uses_optimisations as uses_optimisations,
    without_optimisations as without_optimisations,
)
from onnxplace.machine.ort_values import (
    count_bytes as count_bytes,
    is_absent as is_absent,
    is_copyable_tensor as is_copyable_tensor,
    is_native_array as is_native_array,
    is_native_type as is_native_type,
    make_runner as make_runner,
    to_ort_value as to_ort_value,
    to_ort_value_if_possible as to_ort_value_if_possible,
    to_python as to_python,
)
from onnxplace.machine.repeated_runs import (
    BUSY_WAITING_SHARE as BUSY_WAITING_SHARE,
    DOUBTFUL_WAITING_SHARE as DOUBTFUL_WAITING_SHARE,
    MAX_CREDIBLE_WAITING_SHARE as MAX_CREDIBLE_WAITING_SHARE,
    MAX_SLOWDOWN as MAX_SLOWDOWN,
    MIN_RUNS as MIN_RUNS,
    RepeatPolicy as RepeatPolicy,
    Runs as Runs,
    Stopwatch as Stopwatch,
    find_least_reference_seconds as find_least_reference_seconds,
    find_typical_seconds as find_typical_seconds,
    longest_wait as longest_wait,
    read_run_delays as read_run_delays,
    time_reference as time_reference,
)
from onnxplace.machine.session_errors import LIBRARY_HINT as LIBRARY_HINT, find_disk_full as find_disk_full
from onnxplace.machine.transfer_rates import (
    READ_PIECE_BYTES as READ_PIECE_BYTES,
    drop_pages as drop_pages,
    find_host_rate as find_host_rate,
    measure_read_rate as measure_read_rate,
)
