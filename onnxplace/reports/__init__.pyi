from onnxplace.reports.alternatives import (
    LAYOUT_COLUMNS as LAYOUT_COLUMNS,
    describe_difference as describe_difference,
    describe_layouts as describe_layouts,
)
from onnxplace.reports.differences import compare_figures as compare_figures, compare_pages as compare_pages
from onnxplace.reports.page_data import (
    PlacedGraph as PlacedGraph,
    describe_bundle as describe_bundle,
    describe_placement as describe_placement,
)
from onnxplace.reports.page_records import Comparison as Comparison, PageData as PageData, Quantity as Quantity
from onnxplace.reports.page_rendering import (
    Report as Report,
    build_page_json as build_page_json,
    embed_page as embed_page,
    render_page as render_page,
    require_report as require_report,
    show_bundle as show_bundle,
    write_page as write_page,
    write_report as write_report,
)
from onnxplace.reports.step_analysis import PlacedStep as PlacedStep, divide_chain as divide_chain
from onnxplace.reports.text import (
    compile_summary as compile_summary,
    describe_copies as describe_copies,
    format_table as format_table,
)
