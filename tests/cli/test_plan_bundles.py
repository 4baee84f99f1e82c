"""Commands with bundles that have plans for several sizes: each says which plan it is about."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.bundle.bundle import MANIFEST_FILE
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.driver import plan_sets
from onnxplace.measure.step_inputs import choose_step_inputs, list_switches
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.reports.text import compile_summary
from tests.conftest import branches
from tests.support.chains import cached_decoder
from tests.support.commands import only_json
from tests.support.decoders import optimum_decoder
from tests.support.plan_bundles import edit, make_plan_bundle, replace_plan_file

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")
TABLE = [
    ["size", "weight", "plan", "0", "plan", "1", "fastest"],
    ["batch=4", "1", "0.1", "ms", "0.2", "ms", "plan", "0"],
    ["batch=64", "0.5", "4", "ms", "3", "ms", "plan", "1"],
]
DECODER_SIZES = (
    {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 4},
    {"batch_size": 1, "sequence_length": 5, "past_sequence_length": 0},
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_plan_bundle(tmp_path_factory.mktemp("plans"), sizes=({"batch": 4}, {"batch": 64}, {"batch": 16})).path


@pytest.fixture(scope="module")
def made_decoder(tmp_path_factory):
    """A decoder whose mask is as long as its states and the tokens together; plans for a token and a prompt."""
    folder = tmp_path_factory.mktemp("decoder")
    return make_plan_bundle(folder, optimum_decoder(), DECODER_SIZES, llm=True).path


@pytest.fixture
def bundle(made):
    return Path(shutil.copytree(made, "planned.bundle"))


def read_table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ------------------------------------------------------------------------------------------------------------- compile


def test_the_summary_has_a_row_for_each_size_and_none_for_sizes_between(bundle):
    lines = read_table(compile_summary(onnxplace.load(bundle)))
    assert lines[-4:-1] == TABLE
    assert " ".join(lines[-5]) == "step of 2 plans at each size; the figures above are those of plan 0 at batch=4"


def test_compile_prints_the_sizes_and_lists_plans_as_json(run_cli, model_file):
    options = ("--devices", "cpu:0,cpu:1", "--no-trial", "--force", "-o", "a.bundle")
    result = run_cli("compile", model_file, "--shape", "batch=4", "--shape", "batch=64=0.5", *options)
    assert result.code == 0, result
    rows = read_table(result.out)
    assert [row[:2] for row in rows[-3:-1]] == [["batch=4", "1"], ["batch=64", "0.5"]]
    data = only_json(run_cli("compile", model_file, "--shape", "batch=4", *options, "--json"))
    assert (data["plans"], data["sizes"]) == ([], [])
    data = only_json(
        run_cli("compile", model_file, "--shape", "batch=4", "--shape", "batch=64=0.5", *options, "--json")
    )
    assert [item["dimensions"] for item in data["sizes"]] == [{"batch": 4}, {"batch": 64}]
    assert all(len(item["seconds"]) == 1 + len(data["plans"]) for item in data["sizes"])


def test_compile_of_several_sizes_repeats_no_note_and_calls_no_device_idle_that_a_plan_uses(run_cli, model_file):
    options = ("--devices", "cpu:0,cpu:1", "--no-trial", "-o", "a.bundle", "--json")
    result = run_cli("compile", model_file, "--shape", "batch=1", "--shape", "batch=65536", *options)
    opened = onnxplace.load("a.bundle")
    used = set[str]()
    for plan in opened.plans:
        working = list_route_devices(plan.manifest)
        used |= {name for item in plan.target.devices if item.id in working for name in (item.id, *item.processors)}
    for notes in (only_json(result)["diagnostics"], [vars(item) for item in opened.manifest.diagnostics]):
        texts = [json.dumps(note, sort_keys=True) for note in notes]
        assert len(texts) == len(set(texts))
        assert not [note for note in notes if note["code"] == "P010" and note["where"] in used]
        assert [note["code"] for note in notes].count("P047") == 1


@pytest.mark.parametrize("sizes", [(), ("--shape", "batch=4")])
def test_the_worst_ratio_of_one_size_is_refused_before_any_work(sizes, run_cli, model_file):
    result = run_cli("compile", model_file, *sizes, "--objective", "worst-ratio", "-o", "a.bundle")
    assert result.code == 2
    assert "error[U042] --objective: worst-ratio compares several sizes" in result.err
    assert "repeat --shape" in result.err
    assert not Path("a.bundle").exists()


def test_the_worst_ratio_of_several_sizes_goes_with_weights_that_stream(run_cli, model_file):
    sizes = ("--shape", "batch=4", "--shape", "batch=64", "--objective", "worst-ratio", "--stream", "always")
    result = run_cli("compile", model_file, *sizes, "--no-trial", "--devices", "cpu:0,cpu:1", "-o", "a.bundle")
    assert "excludes --stream off" not in result.err, result


@pytest.mark.parametrize("by_pipeline", [False, True])
def test_plans_are_tried_with_inputs_of_the_seed(by_pipeline, model_file, monkeypatch):
    fed = []
    monkeypatch.setattr(plan_sets, "_measure", lambda plans, feeds, _: fed.append(feeds) or np.ones(len(plans)))
    pipeline = "optimize,profile{estimate=true,seed=7},coplace,single,split,emit"
    options = {"pipeline": pipeline} if by_pipeline else {"seed": 7, "effort": "low", "placer": "single"}
    onnxplace.compile(model_file, "a.bundle", shape=[{"batch": 4}, {"batch": 64}], devices="cpu:0", **options)
    for size, feeds in zip((4, 64), fed, strict=True):
        expected = bind(load(model_file), {"batch": size}, {}).feeds(7)
        np.testing.assert_equal(feeds, expected)


# --------------------------------------------------------------------------------------------------------------- bench


def test_bench_has_a_row_for_each_size(run_cli, bundle):
    result = run_cli("bench", bundle, "--repeat", "2", "--no-memory")
    assert result.code == 0, result
    header, *rows = read_table(result.out)[:3]
    assert " ".join(header).startswith("size plan bundle predicted one device all cores")
    assert [row[0] for row in rows] == ["batch=4", "batch=64"]
    assert f"at batch=4, by plan {rows[0][1]}:" in result.out


def test_bench_prints_the_same_figures_for_each_size_as_json(run_cli, bundle):
    data = only_json(run_cli("bench", bundle, "--repeat", "2", "--no-memory", "--json"))
    first, second = data["sizes"]
    assert [item["dimensions"] for item in data["sizes"]] == [{"batch": 4}, {"batch": 64}]
    assert {**data, "sizes": None} == {**first, "sizes": None}
    steps = [item["seconds"] for item in json.loads((bundle / MANIFEST_FILE).read_text())["sizes"]]
    assert second["predicted_seconds"] in steps[1] or second["predicted_interval_seconds"]
    assert all(item["bundle"]["runs"] >= 2 and item["plan"] in (0, 1) for item in data["sizes"])


def test_bench_of_a_size_between_has_the_step_of_its_plan_and_no_note_on_other_sizes(run_cli, bundle):
    result = run_cli("bench", bundle, "--shape", "batch=16", "--repeat", "2", "--no-memory", "--json")
    data = only_json(result)
    assert (data["predicted_seconds"], data["predicted_interval_seconds"]) == (2e-3, None)
    assert "sizes" not in data
    assert "F008" not in result.err
    result = run_cli("bench", bundle, "--shape", "batch=5", "--repeat", "2", "--no-memory", "--json")
    assert only_json(result)["predicted_seconds"] is None
    assert "predictions are for batch=" in result.err


@pytest.fixture
def fixed(run_cli, model_file):
    """A bundle of fixed sizes, each of which has its plan and its copy of the model."""
    sizes = ("--shape", "batch=4", "--shape", "batch=64", "--fixed-sizes")
    assert run_cli("compile", model_file, *sizes, "--devices", "cpu:0", "--no-trial", "-o", "fixed.bundle").code == 0


def test_bench_has_a_row_for_each_fixed_size_and_takes_one_of_them(run_cli, fixed):
    options = ("--repeat", "1", "--no-memory")
    result = run_cli("bench", "fixed.bundle", *options)
    assert [row[:2] for row in read_table(result.out)[1:3]] == [["batch=4", "0"], ["batch=64", "1"]], result
    assert run_cli("bench", "fixed.bundle", "--shape", "batch=64", *options).code == 0


def test_verify_compares_each_fixed_size_also_in_the_session_that_chooses(run_cli, fixed):
    result = run_cli("verify", "fixed.bundle")
    assert "compared with batch=4 by plan 0; fixed sizes by plan 1; batch=4; batch=64\n" in result.out, result


@pytest.mark.parametrize("command", ["bench", "run", "verify"])
def test_one_size_is_not_given_twice_where_a_bundle_runs(run_cli, bundle, command):
    result = run_cli(command, bundle, "--shape", "batch=4", "--shape", "batch=64")
    assert (result.code, "dimension 'batch' is given twice" in result.err) == (2, True), result


@pytest.mark.parametrize("name", ["", "plan1"])
def test_bench_does_not_update_plans_one_by_one(run_cli, bundle, name):
    before = (bundle / name / MANIFEST_FILE).read_bytes()
    result = run_cli("bench", bundle / name, "--update", "--repeat", "1")
    assert result.code == 2
    assert "error[U042] --update: a trial runs all plans of a bundle in turns" in result.err
    assert (bundle / name / MANIFEST_FILE).read_bytes() == before


def test_bench_of_several_sizes_judges_the_least_speedup(run_cli, bundle):
    assert run_cli("bench", bundle, "--repeat", "1", "--no-memory", "--min-speedup", "1000").code == 1


def test_a_bundle_of_one_plan_for_several_sizes_has_rows_too(run_cli, bundle):
    shutil.rmtree(bundle / "plan1")

    def keep_one_plan(data):
        data["plans"] = []
        data["files"] = {name: item for name, item in data["files"].items() if not name.startswith("plan1/")}
        for item in data["sizes"]:
            item["seconds"] = item["seconds"][:1]

    edit(bundle / MANIFEST_FILE, keep_one_plan)
    data = only_json(run_cli("bench", bundle, "--repeat", "2", "--no-memory", "--json"))
    assert [item["predicted_seconds"] for item in data["sizes"]][1] == 4e-3
    assert "step of 1 plan at each size; the figures above are those of plan 0 at batch=4\n" in compile_summary(
        onnxplace.load(bundle)
    )


# -------------------------------------------------------------------------------------------------------------- verify


def test_verify_compares_each_plan_and_the_session_that_chooses(run_cli, bundle):
    result = run_cli("verify", bundle, "--sizes", "1")
    assert result.code == 0, result
    compared = result.out.splitlines()[-1].removeprefix("compared with ").split("; ")
    assert compared == [
        "batch=4 by plan 0", "batch=5 by plan 0", "batch=64 by plan 1", "batch=65 by plan 1", "batch=4", "batch=64"
    ]  # fmt: skip
    data = only_json(run_cli("verify", bundle, "--shape", "batch=3", "--json"))
    assert [(item["sizes"], item.get("plan")) for item in data["sizes"]] == [
        ({"batch": 3}, 0), ({"batch": 3}, 1), ({"batch": 3}, None)
    ]  # fmt: skip


def test_verify_says_which_plan_differs(run_cli, bundle):
    segment = next(iter(onnxplace.load(bundle / "plan1").manifest.segments)).file
    model = onnx.load(bundle / "plan1" / segment, load_external_data=False)
    changed = {"Relu": "Neg", "Tanh": "Sin"}
    for node in model.graph.node:
        node.op_type = changed.get(node.op_type, node.op_type)
    replace_plan_file(bundle, segment, model.SerializeToString())
    result = run_cli("verify", bundle, "--sizes", "0")
    assert result.code == 1
    assert result.out.startswith("DIFFERS y")
    assert "first with batch=64 by plan 1" in result.out
    data = only_json(run_cli("verify", bundle, "--sizes", "0", "--json"))
    differing = [item.get("plan") for item in data["sizes"] if item["result"] == "differs"]
    assert differing[0] == 1
    assert 0 not in differing


def test_verify_of_a_decoder_goes_from_the_prompt_to_tokens(run_cli, made_decoder):
    data = only_json(run_cli("verify", made_decoder, "--sizes", "1", "--json"))
    assert data["equal"]
    assert [item.get("plan") for item in data["sizes"] if item["result"] == "equal"][-1] is None
    result = onnxplace.verify(made_decoder, sizes=0)
    assert len(result.sizes[-1].steps) == 2
    assert {output.name for output in result.outputs} >= {"logits", "present.0.key"}


def test_verify_compares_plans_whose_states_are_split_and_whole(tmp_path, run_cli):
    sizes = ({"seq": 1, "past": 8}, {"seq": 4, "past": 0})
    second = "optimize,profile{estimate=true},shard{ways=2,weights=least},coplace,fuse,m-etf,split,emit"
    bundle = make_plan_bundle(tmp_path, cached_decoder(), sizes, second, state={"present": "past"})
    (state,) = bundle.plans[1].manifest.sharding.states
    result = onnxplace.verify(bundle, sizes=1)
    assert result.equal
    assert {output.name for output in result.outputs} == {"y", "present", *state.outputs}
    segment = next(item for item in bundle.plans[1].manifest.segments if state.outputs[1] in item.outputs).file
    model = onnx.load(bundle.path / "plan1" / segment, load_external_data=False)
    for node in model.graph.node:
        node.op_type = {"Softmax": "LogSoftmax"}.get(node.op_type, node.op_type)
    replace_plan_file(bundle.path, segment, model.SerializeToString())
    result = run_cli("verify", bundle.path, "--sizes", "0")
    assert (result.code, result.err) == (1, "")
    assert "by plan 1" in next(line for line in result.out.splitlines() if line.startswith("DIFFERS"))


def test_the_second_step_of_a_conversation_has_the_size_of_a_token_and_the_mask_of_both(made_decoder):
    opened = onnxplace.load(made_decoder)
    token, prompt = (choose_step_inputs(opened, None, sizes, 0) for sizes in DECODER_SIZES)
    (steps,) = list_switches([token, prompt])
    states = {item.input for item in opened.manifest.states}
    assert steps.feeds(0)["input_ids"].shape == (1, 5)
    steps.learn({name: np.zeros((1, 2, 5, 16), np.float32) for name in states})
    later = steps.feeds(1)
    assert {name: array.shape for name, array in later.items()} == {
        "input_ids": (1, 1), "attention_mask": (1, 6), "position_ids": (1, 1)
    }  # fmt: skip


def test_a_conversation_of_states_that_do_not_grow_changes_its_size_too(made_decoder):
    opened = onnxplace.load(made_decoder)
    token, prompt = (choose_step_inputs(opened, None, sizes, 0) for sizes in DECODER_SIZES)
    (steps,) = list_switches([token, prompt])
    steps.learn({})
    assert steps.feeds(1)["input_ids"].shape == (1, 1)


# ------------------------------------------------------------------------------------------------- report, run, traces


def test_the_report_has_the_table_of_sizes_and_each_plan_has_a_report(run_cli, bundle):
    page = only_json(run_cli("report", bundle, "--json"))["pages"][0]
    table = next(item for item in page["division"] if item["header"][0] == "size")
    assert [" ".join(row).split() for row in (table["header"], *table["rows"])] == TABLE
    assert "`onnxplace report BUNDLE/plan1`" in table["caption"]
    page = only_json(run_cli("report", bundle / "plan1", "--json"))["pages"][0]
    assert not [item for item in page["division"] if item["header"][0] == "size"]
    assert run_cli("report", bundle, bundle / "plan1", "-o", "both.html").code == 0


def test_differences_of_two_bundles_name_sizes_and_not_their_steps(run_cli, bundle, made):
    other = Path(shutil.copytree(made, "other.bundle"))
    edit(other / MANIFEST_FILE, lambda data: data["sizes"][0].update(seconds=[1e-3, 2e-3]))
    tables = only_json(run_cli("report", bundle, other, "--json"))["comparison"]["tables"]
    assert not [item for item in tables if "size" in item["header"]]
    edit(other / MANIFEST_FILE, lambda data: data["sizes"][0].update(seconds=[3e-3, 2e-3]))
    tables = only_json(run_cli("report", bundle, other, "--json"))["comparison"]["tables"]
    assert [item["rows"] for item in tables if "size" in item["header"]] == [
        [["A", "batch=4", "1", "plan 0"], ["B", "batch=4", "1", "plan 1"]]
    ]


def test_run_says_which_plan_ran(run_cli, bundle, compiled):
    data = only_json(run_cli("run", bundle, "--json"))
    assert data["plan"] in (0, 1)
    assert f", the first by plan {data['plan']}" in run_cli("run", bundle).out
    assert "plan" not in only_json(run_cli("run", compiled, "--json"))


def test_a_trace_has_processes_for_each_plan_and_reports_show_their_own(run_cli, bundle, monkeypatch):
    opened = onnxplace.load(bundle)
    with onnxplace.InferenceSession(opened, trace=True) as session:
        for batch in (4, 64):
            session.run(None, {"x": np.zeros((batch, 64), np.float32)})
        timelines = [replace(item, plan=number) for number, item in enumerate(session.list_timelines())]
        monkeypatch.setattr(session, "list_timelines", lambda: tuple(timelines))
        # The second request ran as the first plan's segments; its timeline is as good as any.
        trace = session.trace()
    names = [item["args"]["name"] for item in trace["traceEvents"] if item["name"] == "process_name"]
    assert names == ["measured", "predicted", "measured plan1", "predicted plan1"]
    threads = [(item["pid"], item["tid"]) for item in trace["traceEvents"] if item["name"] == "thread_name"]
    assert len({thread for _, thread in threads}) == len(threads)
    Path("trace.json").write_text(json.dumps(trace))
    for folder, number in ((bundle, 0), (bundle / "plan1", 1)):
        result = run_cli("report", folder, "--trace", "trace.json", "--json")
        assert result.code == 0, result
        names = [item["name"] for item in only_json(result)["pages"][0]["timelines"]]
        assert names == ["measured", "predicted"], number


# ------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize(
    "command",
    ["merge -o out", *(f"export --to {to} -o out" for to in ("stages", "onnx-metadata", "ort-layers", "triton"))],
)
def test_exports_have_the_main_plan_and_name_the_others(run_cli, bundle, command):
    result = run_cli(*command.split(), bundle)
    assert result.code == 0, result
    assert "note[I001]" in result.err
    assert "plan 0 only, without plan1, for other sizes" in result.err
    shutil.rmtree("out") if Path("out").is_dir() else Path("out").unlink()
    result = run_cli(*command.split(), bundle / "plan1")
    assert result.code == 0, result
    assert "plan 0" not in result.err


@pytest.mark.parametrize("links_weights", [False, True])
def test_a_plan_is_merged_with_the_weights_of_its_bundle(run_cli, tmp_path, links_weights):
    folder = tmp_path / "here"
    folder.mkdir()
    bundle = make_plan_bundle(folder, **({"link_weights": True} if links_weights else {}))
    assert run_cli("merge", bundle.path / "plan1", "-o", "merged.onnx").code == 0
    x = {"x": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}
    expected = onnxplace.InferenceSession(bundle.plans[1]).run(None, x)[0]
    import onnxruntime

    actual = onnxruntime.InferenceSession("merged.onnx").run(None, x)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert run_cli("export", bundle.path / "plan1", "--to", "triton", "-o", "triton").code == 0


def test_one_plan_for_several_sizes_is_compared_at_each_of_them(run_cli, tmp_path):
    bundle = tmp_path / "one.bundle"
    sizes = ("--shape", "batch=3", "--shape", "batch=65")
    onnx.save(branches(), tmp_path / "m.onnx")
    assert run_cli("compile", tmp_path / "m.onnx", "-o", bundle, "--devices", "cpu:0", *sizes).code == 0
    compared = only_json(run_cli("verify", bundle, "--sizes", "0", "--json"))["sizes"]
    assert [item["sizes"] for item in compared] == [{"batch": 3}, {"batch": 3}, {"batch": 65}]
    assert {item["plan"] for item in compared} == {None}
