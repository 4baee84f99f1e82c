"""Text for people: tables, summaries, traces."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.report.text import (
        chrome_trace as chrome_trace,
        compile_summary as compile_summary,
        devices_summary as devices_summary,
        mebibytes as mebibytes,
        milliseconds as milliseconds,
        pass_help as pass_help,
        placed_summary as placed_summary,
        table as table,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "text": ("chrome_trace compile_summary devices_summary mebibytes milliseconds pass_help placed_summary table"),
    },
)
