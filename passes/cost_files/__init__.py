"""Costs read from files: our own and those of other tools."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.cost_files.cost_file import format_costs as format_costs, read_costs as read_costs
    from onnxplace.passes.cost_files.csv_table import format_costs_csv as format_costs_csv
    from onnxplace.passes.cost_files.foreign import (
        ImportedCosts as ImportedCosts,
        is_foreign_file as is_foreign_file,
        read_foreign as read_foreign,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "cost_file": "format_costs read_costs",
        "csv_table": "format_costs_csv",
        "foreign": "ImportedCosts is_foreign_file read_foreign",
    },
)
