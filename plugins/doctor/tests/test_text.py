"""The text of a report has each detail whole and once."""

from onnxplace_doctor.doctor_report import CheckResult, DoctorReport, format_report

WORDS = [f"word{number}" for number in range(60)]


def test_long_details_are_wrapped_below_each_other_not_cut():
    checks = tuple(CheckResult(name, ("cpu:0",), "ok", " ".join(WORDS)) for name in ("link", "faults"))
    text = format_report(DoctorReport({}, ("cpu:0",), checks, 1.0))
    lines = text.splitlines()[1:]
    assert text.split().count(WORDS[0]) == text.split().count(WORDS[-1]) == len(checks)
    assert "..." not in text
    column = lines[0].index(WORDS[0])
    assert {line.index("word") for line in lines if "word" in line} == {column}
    assert max(map(len, lines)) <= column + 100


def test_failures_are_whole_below_the_table():
    checks = (CheckResult("link", ("cpu:0",), "failed", " ".join(WORDS)),)
    assert f"failed link cpu:0: {' '.join(WORDS)}" in format_report(DoctorReport({}, ("cpu:0",), checks, 1.0))
