"""The self-check of a machine: `onnxplace doctor`."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.doctor.checks import CHECKS as CHECKS
    from onnxplace.doctor.examination import DEFAULT_SECONDS as DEFAULT_SECONDS, examine as examine
    from onnxplace.doctor.report import CheckResult as CheckResult, DoctorReport as DoctorReport
    from onnxplace.doctor.text import format_report as format_report

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "checks": "CHECKS",
        "examination": "DEFAULT_SECONDS examine",
        "report": "CheckResult DoctorReport",
        "text": "format_report",
    },
)
