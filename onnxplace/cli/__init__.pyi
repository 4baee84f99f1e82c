from onnxplace.cli.app import entry as entry, main as main
from onnxplace.cli.shared_options import (
    FiniteNumber as FiniteNumber,
    announce_loop_compilation as announce_loop_compilation,
    as_json as as_json,
    parse_shape as parse_shape,
    print_json as print_json,
    print_text as print_text,
    seed_option as seed_option,
    shape_option as shape_option,
    target_output_option as target_output_option,
    with_machine as with_machine,
)
from onnxplace.cli.terminal import show_progress as show_progress
