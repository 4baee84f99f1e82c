"""Costs read from files: our own and those of other tools."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.cost_files.cost_file import costs_text as costs_text, read_costs as read_costs
    from onnxplace.passes.cost_files.csv_table import costs_table as costs_table
    from onnxplace.passes.cost_files.foreign import (
        Imported as Imported,
        is_foreign as is_foreign,
        read_foreign as read_foreign,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "cost_file": "costs_text read_costs",
        "csv_table": "costs_table",
        "foreign": "Imported is_foreign read_foreign",
    },
)
