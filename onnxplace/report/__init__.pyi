from onnxplace.report.page_data import (
    PlacedGraph as PlacedGraph,
    describe_bundle as describe_bundle,
    describe_placement as describe_placement,
)
from onnxplace.report.page_records import PageData as PageData
from onnxplace.report.page_rendering import (
    build_page_json as build_page_json,
    render_page as render_page,
    require_report_packages as require_report_packages,
)
from onnxplace.report.text import (
    compile_summary as compile_summary,
    describe_copies as describe_copies,
    format_bytes as format_bytes,
    format_milliseconds as format_milliseconds,
    format_table as format_table,
)
from onnxplace.report.verdict import compare_pages as compare_pages
