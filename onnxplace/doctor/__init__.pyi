from onnxplace.doctor.checks import CHECKS as CHECKS
from onnxplace.doctor.examination import DEFAULT_SECONDS as DEFAULT_SECONDS, examine as examine
from onnxplace.doctor.report import CheckResult as CheckResult, DoctorReport as DoctorReport
from onnxplace.doctor.text import format_report as format_report
