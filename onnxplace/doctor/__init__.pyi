from onnxplace.doctor.doctor_report import (
    CheckResult as CheckResult,
    DoctorReport as DoctorReport,
    format_report as format_report,
)
from onnxplace.doctor.examination import CHECKS as CHECKS, DEFAULT_SECONDS as DEFAULT_SECONDS, examine as examine
