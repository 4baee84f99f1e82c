from onnxplace.cli.app import entry as entry, main as main
from onnxplace.cli.completion import BUNDLE_PATH as BUNDLE_PATH, PATH as PATH
from onnxplace.cli.help import GroupedCommand as GroupedCommand
from onnxplace.cli.shared_options import (
    FiniteNumber as FiniteNumber,
    announce_loop_compilation as announce_loop_compilation,
    as_json as as_json,
    note_core_shortage as note_core_shortage,
    parse_shape as parse_shape,
    print_hint as print_hint,
    print_json as print_json,
    print_notes as print_notes,
    print_text as print_text,
    seed_option as seed_option,
    shape_option as shape_option,
    target_output_option as target_output_option,
    with_machine as with_machine,
    with_operator_libraries as with_operator_libraries,
    with_runtime as with_runtime,
)
from onnxplace.cli.terminal import print_aside as print_aside, show_progress as show_progress
