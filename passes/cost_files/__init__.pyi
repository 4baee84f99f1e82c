from onnxplace.passes.cost_files.cost_file import (
    format_costs as format_costs,
    format_costs_csv as format_costs_csv,
    read_costs as read_costs,
)
