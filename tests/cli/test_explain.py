"""`onnxplace explain`: what an error code means, a usual cause, and what to do."""

import pytest

from onnxplace.cli.explain import read_error_pages
from tests.support.commands import only_json


def test_pages_are_plain_text():
    pages = read_error_pages()
    assert len(pages) > 100
    for page in pages.values():
        assert page.exit in ("note", "1", "2", "3", "4", "130", "2 or 4", "2, or note", "3, or note", "4, or note")
        assert page.meaning
        assert page.cause.endswith(".")
        assert "](" not in page.meaning + page.cause + page.fix  # links are paths


def test_a_code_is_explained_in_any_case_and_with_brackets(run_cli):
    shown = run_cli("explain", "P010")
    assert shown.code == 0
    assert shown.out.startswith("P010: a requested device gets no work")
    for label in ("kind:  exit code 3, or note", "cause: ", "do:    "):
        assert f"\n{label}" in shown.out
    assert run_cli("explain", "[p010]").out == shown.out
    assert run_cli("explain", "error[P010] cpu:1: this device gets no work").out == shown.out


def test_all_codes_are_listed(run_cli):
    listed = run_cli("explain").out.splitlines()
    assert [line.split()[0] for line in listed] == ["code", *read_error_pages()]
    assert [page["code"] for page in only_json(run_cli("explain", "--json"))["errors"]] == list(read_error_pages())


def test_json_has_the_parts_of_a_page(run_cli):
    page = only_json(run_cli("explain", "n001", "--json"))
    assert set(page) == {"code", "exit", "meaning", "cause", "fix"}
    assert page["meaning"] == "not a bundle"


@pytest.mark.parametrize(
    ("code", "expected_words"),
    [("P019", "nearest: P020, P021, "), ("Q001", "did you mean"), ("what", "`onnxplace explain` lists all")],
)
def test_an_unknown_code_gets_the_nearest_ones(run_cli, code, expected_words):
    result = run_cli("explain", code)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error[U005] CODE: there is no error code '{code}'")
    assert expected_words in result.err


def test_errors_on_a_terminal_name_the_command(monkeypatch, run_cli):
    assert "onnxplace explain" not in run_cli("run", "missing.bundle").err
    monkeypatch.setattr("onnxplace.cli.app.is_terminal", lambda: True)
    assert run_cli("run", "missing.bundle").err.endswith("  more: onnxplace explain N001\n")
