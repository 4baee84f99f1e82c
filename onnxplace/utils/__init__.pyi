from onnxplace._lazy import attach as attach
from onnxplace.utils.control_groups import (
    count_free_bytes as count_free_bytes,
    find_core_limit as find_core_limit,
    list_cores as list_cores,
)
from onnxplace.utils.differences import find_largest_error as find_largest_error, relative_error as relative_error
from onnxplace.utils.docstrings import read_field_docs as read_field_docs
from onnxplace.utils.file_locks import (
    OCCUPIED_ERRORS as OCCUPIED_ERRORS,
    FileLock as FileLock,
    find_moved_aside as find_moved_aside,
    hold_file_lock as hold_file_lock,
    sweep_leftovers as sweep_leftovers,
    temporary_folder as temporary_folder,
)
from onnxplace.utils.files import (
    cannot_write_error as cannot_write_error,
    disk_error as disk_error,
    find_library_error as find_library_error,
    format_path as format_path,
    open_input as open_input,
    parse_json as parse_json,
    read_bytes as read_bytes,
    read_json as read_json,
    read_text as read_text,
    require_different_files as require_different_files,
    require_valid_path as require_valid_path,
    require_writable as require_writable,
    suggest_file as suggest_file,
    write_each as write_each,
    write_file as write_file,
    write_refused_error as write_refused_error,
)
from onnxplace.utils.jit import (
    budget_clock as budget_clock,
    compiled_loop as compiled_loop,
    compiled_part as compiled_part,
    in_place as in_place,
    linear_in_place as linear_in_place,
    linear_loop as linear_loop,
    on_compiling as on_compiling,
)
from onnxplace.utils.keywords import checks_arguments as checks_arguments, takes_fields_of as takes_fields_of
from onnxplace.utils.linear_programs import LinearProgram as LinearProgram, run_highs as run_highs
from onnxplace.utils.names import claim_name as claim_name, match_names as match_names, match_stars as match_stars
from onnxplace.utils.progress import (
    ProgressObserver as ProgressObserver,
    observe_progress as observe_progress,
    progress_part as progress_part,
    report_progress as report_progress,
    report_time_limit as report_time_limit,
)
from onnxplace.utils.quantities import (
    format_bytes as format_bytes,
    format_first as format_first,
    format_milliseconds as format_milliseconds,
    format_object as format_object,
    format_time as format_time,
)
from onnxplace.utils.random_kernels import random_uniform as random_uniform
from onnxplace.utils.renames import exchange_names as exchange_names, rename_new as rename_new
from onnxplace.utils.standard_output import keep_stdout as keep_stdout
from onnxplace.utils.subprocesses import (
    ChildProcess as ChildProcess,
    run_in_child as run_in_child,
    start_child as start_child,
)
from onnxplace.utils.threads import (
    Callbacks as Callbacks,
    call_guarded as call_guarded,
    run_in_threads as run_in_threads,
    start_thread as start_thread,
)
