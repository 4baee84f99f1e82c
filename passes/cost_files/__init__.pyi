from onnxplace.passes.cost_files.cost_file import format_costs as format_costs, read_costs as read_costs
from onnxplace.passes.cost_files.csv_table import format_costs_csv as format_costs_csv
