"""Output paths that exist or cannot be written are refused before any work."""

from pathlib import Path

import pytest

import onnxplace
from tests.support.bad_input import SHAPE, edit_manifest

pytestmark = pytest.mark.usefixtures("no_gpus")


def test_an_output_folder_that_exists_is_refused_before_any_work(refused, model_file, bundle_copy):
    expected_words = refused(2, ("bundle", "exists", "--force"), "compile", model_file, "-o", bundle_copy)
    assert "batch" not in expected_words  # the unbound dimension would be the next complaint


def test_force_replaces_a_bundle_and_leaves_nothing_of_the_old_one(run_cli, model_file, bundle_copy, fast_pipeline):
    (bundle_copy / "segments" / "old-000.onnx").write_bytes(b"old")
    edit_manifest(bundle_copy, lambda m: m["files"].update({"segments/old-000.onnx": {"sha256": "", "bytes": 3}}))
    pipeline = fast_pipeline.replace("m-etf", "single")
    before = set(model_file.parent.iterdir())
    result = run_cli("compile", model_file, *SHAPE, "-o", bundle_copy, "--pipeline", pipeline, "--force")
    assert result.code == 0
    assert set(model_file.parent.iterdir()) == before
    assert not (bundle_copy / "segments" / "old-000.onnx").exists()
    assert onnxplace.load(bundle_copy, "all").manifest.placer == "single"


def test_force_replaces_an_empty_folder(run_cli, model_file, fast_pipeline):
    empty = model_file.parent / "empty"
    empty.mkdir()
    assert run_cli("compile", model_file, *SHAPE, "-o", empty, "--pipeline", fast_pipeline, "--force").code == 0
    assert onnxplace.load(empty).manifest.placer == "m-etf"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("precious", "not a bundle"),
        ("letter", "not a bundle"),
        ("model.onnx", "not a bundle"),
        ("link", "expected a bundle, got a symbolic link"),
        (".", "expected a bundle, got the current folder"),
    ],
)
def test_force_never_replaces_what_is_not_a_bundle(refused, model_file, fast_pipeline, output, reason):
    folder = model_file.parent
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.tex").write_text("years of work")
    (folder / "letter").write_text("dear")
    (folder / "link").symlink_to("precious")
    options = ("-o", output, "--pipeline", fast_pipeline, "--force")
    refused(2, (output, reason, "--force"), "compile", model_file, *SHAPE, *options)


def test_a_folder_that_cannot_be_created_is_named(refused, model_file, fast_pipeline):
    options = ("-o", "model.onnx/bundle", "--pipeline", fast_pipeline)
    refused(2, ("model.onnx", "cannot write there"), "compile", model_file, *SHAPE, *options)


def test_a_link_to_a_bundle_is_refused_or_followed_before_any_work(refused, model_file, bundle_copy, fast_pipeline):
    (model_file.parent / "link").symlink_to("bundle")
    options = ("-o", "link", "--pipeline", fast_pipeline, "--force")
    refused(2, ("link",), "compile", model_file, *SHAPE, *options)


def test_a_link_that_leads_nowhere_is_refused_as_output(refused, model_file, fast_pipeline):
    (model_file.parent / "link").symlink_to("nowhere")
    refused(2, ("link",), "compile", model_file, *SHAPE, "-o", "link", "--pipeline", fast_pipeline)


def test_an_output_name_that_is_too_long_is_refused(refused, model_file, fast_pipeline):
    refused(2, ("too long",), "compile", model_file, *SHAPE, "-o", "x" * 300, "--pipeline", fast_pipeline)


def test_force_refuses_other_folders_before_any_work(refused, model_file):
    (model_file.parent / "precious").mkdir()
    (model_file.parent / "precious" / "thesis.tex").write_text("years of work")
    expected_words = refused(2, ("not a bundle",), "compile", model_file, "-o", "precious", "--force")
    assert "batch" not in expected_words


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            "FAST,emit",
        ),
        pytest.param(
            "FAST,profile{estimate=true}",
        ),
    ],
)
def test_a_pipeline_that_does_not_end_with_its_only_emit_leaves_nothing(refused, model_file, fast_pipeline, pipeline):
    refused(2, ("emit",), "compile", model_file, *SHAPE, "--pipeline", pipeline.replace("FAST", fast_pipeline))


@pytest.mark.parametrize("option", ["--outputs", "--trace"])
@pytest.mark.parametrize("where", ["nowhere/file", "bundle"])
def test_results_that_cannot_be_written_are_refused(refused, bundle_copy, option, where):
    refused(2, (where, "cannot write there"), "run", bundle_copy, option, where)


def test_two_results_are_not_written_to_one_file(refused, bundle_copy, model_file, fast_pipeline):
    words = ("same.json: cannot write there: --outputs and --trace name the same file",)
    refused(2, words, "run", bundle_copy, "--outputs", "same.json", "--trace", "./same.json")
    words = ("same: cannot write there: --output and --save-costs name the same file",)
    refused(2, words, "compile", model_file, "--shape", "batch=4", "-o", "same", "--save-costs", "same")
    assert not Path("same.json").exists()
    assert not Path("same").exists()


def test_a_target_file_that_cannot_be_written_is_refused(refused):
    refused(2, ("nowhere/t.toml", "cannot write there"), "devices", "-o", "nowhere/t.toml")


def test_results_cannot_be_written_over_the_working_folder(refused, bundle_copy):
    refused(2, ("cannot write there",), "run", bundle_copy, "--outputs", ".")
