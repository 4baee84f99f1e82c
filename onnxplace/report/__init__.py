"""Text for people: tables and summaries."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.report.text import (
        compile_summary as compile_summary,
        describe_copies as describe_copies,
        format_bytes as format_bytes,
        format_milliseconds as format_milliseconds,
        format_table as format_table,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "text": "compile_summary describe_copies format_bytes format_milliseconds format_table",
    },
)
