from onnxplace.cli.app import entry as entry, main as main
from onnxplace.cli.options import (
    announce_loop_compilation as announce_loop_compilation,
    as_json as as_json,
    parse_shape as parse_shape,
    seed_option as seed_option,
    shape_option as shape_option,
)
from onnxplace.cli.output import print_json as print_json, print_text as print_text
from onnxplace.cli.progress import show_progress as show_progress
