"""A bundle with plans is opened only if they are plans of it: of the same model, in folders of it, with their steps."""

import shutil

import numpy as np
import pytest

import onnxplace
from onnxplace.bundle.bundle import MANIFEST_FILE
from onnxplace.bundle.manifest import LinkRecord
from tests.support.plan_bundles import describe, edit, edit_plan, make_plan_bundle


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_plan_bundle(tmp_path_factory.mktemp("plans")).path


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "planned.bundle")


def assert_refused(run_cli, bundle, *texts):
    for command in ("run", "verify", "bench", "merge -o a.onnx", "report"):
        result = run_cli(*command.split(), bundle)
        assert result.code == 2, result
        for words in texts:
            assert words in result.err
    with pytest.raises(onnxplace.BundleError):
        onnxplace.load(bundle)


def test_a_bundle_with_plans_is_opened_with_all_of_them(bundle):
    opened = onnxplace.load(bundle, "all")
    assert [plan.path.name for plan in opened.plans] == ["planned.bundle", "plan1"]
    assert [plan.is_plan for plan in opened.plans] == [False, True]
    assert opened.plans[1].plans == (opened.plans[1],)


@pytest.mark.parametrize("names", [["../plan1"], ["."], ["plan1/../plan1"], ["plan2"], ["segments"], [""]])
def test_plans_are_folders_as_the_compiler_names_them(run_cli, bundle, names):
    edit(
        bundle / MANIFEST_FILE,
        lambda data: (
            data.update(plans=names),
            data["files"].update({f"{names[0]}/{MANIFEST_FILE}": data["files"][f"plan1/{MANIFEST_FILE}"]}),
        ),
    )
    assert_refused(run_cli, bundle, "error[N002]")


def test_a_plan_is_not_listed_twice(run_cli, bundle):
    edit(bundle / MANIFEST_FILE, lambda data: data.update(plans=["plan1", "plan1"]))
    assert_refused(run_cli, bundle, "error[N002]", "its plans are plan1, plan1, expected plan1, plan2 and so on")


def test_a_plan_that_is_missing_is_named(run_cli, bundle):
    shutil.rmtree(bundle / "plan1")
    assert_refused(run_cli, bundle, "error[N002]", "plan1", "this file of the bundle is missing")


def test_a_plan_that_was_altered_is_named(run_cli, bundle):
    edit(bundle / "plan1" / MANIFEST_FILE, lambda data: data.update(model="other"))
    assert_refused(run_cli, bundle, "error[N002]", f"plan1/{MANIFEST_FILE}", "expected")


def test_a_plan_that_is_a_link_out_of_the_bundle_is_refused(run_cli, bundle, tmp_path):
    (bundle / "plan1").rename(tmp_path / "elsewhere")
    (bundle / "plan1").symlink_to(tmp_path / "elsewhere")
    assert_refused(run_cli, bundle, "error[N002]", "it names a file outside the bundle")


def test_a_plan_that_links_to_the_bundle_itself_does_not_open_it_forever(run_cli, bundle):
    shutil.rmtree(bundle / "plan1")
    (bundle / "plan1").symlink_to(".")
    edit(
        bundle / MANIFEST_FILE,
        lambda data: data.update(files={name: item for name, item in data["files"].items() if "plan1" not in name}),
    )
    assert_refused(run_cli, bundle, "error[N002]")


@pytest.mark.parametrize(
    "change",
    [
        {"plans": ["plan1"], "sizes": []},
        {"model_digest": "0" * 64},
        {"inputs": [{"name": "x", "dtype": "tensor(double)", "shape": ["batch", 64]}]},
    ],
)
def test_a_plan_of_another_model_or_with_plans_is_refused(run_cli, bundle, change):
    edit_plan(bundle, lambda data: data.update(change))
    words = "plan plan1: it has plans of its own, or another model, inputs, outputs or states"
    assert_refused(run_cli, bundle, "error[N002]", words)


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 2.0, 3.0], [None, None]])
def test_each_size_has_a_step_of_each_plan_and_one_that_takes_it(run_cli, bundle, seconds):
    edit(bundle / MANIFEST_FILE, lambda data: data["sizes"][0].update(seconds=seconds))
    words = f"expected a step of each plan, 2 in all, at {{'batch': 4}}, got {seconds}"
    assert_refused(run_cli, bundle, "error[N002]", words)


def test_the_weights_of_a_plan_are_not_read_from_above_a_bundle_that_is_not_there(run_cli, bundle, tmp_path):
    """Two levels up is one more than a bundle may link to, unless it is in another one."""
    alone = shutil.copytree(bundle / "plan1", tmp_path / "above" / "alone")
    (tmp_path / "segments").mkdir()
    shutil.copy(bundle / "segments" / "weights.bin", tmp_path / "segments")
    edit(alone / MANIFEST_FILE, lambda data: data.update(link_levels=2))
    edit(alone / MANIFEST_FILE, lambda data: data["linked"].update(describe(tmp_path, "segments/weights.bin")))
    assert_refused(run_cli, alone, "error[N002]", "this plan is not in its bundle")


def test_a_plan_that_was_taken_out_of_its_bundle_says_what_is_missing(run_cli, bundle, tmp_path):
    alone = shutil.copytree(bundle / "plan1", tmp_path / "alone")
    assert_refused(run_cli, alone, "error[N009]", "this weights file, to which the bundle refers, is missing")


@pytest.mark.parametrize(
    ("shape", "fed", "takes"),
    [
        (["batch", 64], (3, 64), True),
        ([4, 64], (4, 64), True),
        ([4, 64], (3, 64), False),
        (None, (3, 64), True),  # of unknown rank
    ],
)
def test_a_bundle_takes_the_sizes_that_its_inputs_do_not_fix(bundle, shape, fed, takes):
    edit(bundle / MANIFEST_FILE, lambda data: data["values"]["x"].update(shape=shape))
    opened = onnxplace.load(bundle)
    assert opened.takes_sizes({"x": np.zeros(fed, np.float32), "unknown": 1}) == takes
    assert opened.takes_sizes({"x": [1.0]})  # the session refuses what is no array


@pytest.mark.parametrize(("mtime_ns", "ctime_ns", "is_shared"), [(0, 0, True), (0, 5, False), (5, 0, False)])
def test_a_file_with_a_time_is_no_file_of_the_bundle_around_a_plan(mtime_ns, ctime_ns, is_shared):
    """A user's own file may have been written at time 0, and older bundles have no second time."""
    assert LinkRecord(sha256="", bytes=1, mtime_ns=mtime_ns, ctime_ns=ctime_ns).is_shared is is_shared
