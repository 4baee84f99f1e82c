"""`onnxplace plan` for several sizes: sets of plans, and prompts and tokens of a decoder."""

import json
import math

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxplace
from onnxplace.target.target import Device, Link, Target
from onnxplace.target.target_file import format_target

WIDTH = 512


@pytest.fixture
def decoder(tmp_path):
    """Products with a cache of all tokens: prompts compute, and tokens read weights. Its weights are not there."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        small (float[batch, seq, {WIDTH}] tokens, float[batch, 1, past, {WIDTH}] past_0)
            => (float[batch, seq, {WIDTH}] y, float[batch, 1, total, {WIDTH}] present_0) {{
            h = MatMul(tokens, w0)
            k = MatMul(h, w1)
            one = Unsqueeze(k, axis)
            present_0 = Concat<axis=2>(past_0, one)
            all = Squeeze(present_0, axis)
            transposed = Transpose<perm=[0, 2, 1]>(all)
            scores = MatMul(k, transposed)
            y = MatMul(scores, all)
        }}"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    for name in ("w0", "w1"):
        weight = onnx.TensorProto(name=name, dims=[WIDTH, WIDTH], data_type=1, data_location=1)
        weight.external_data.add(key="location", value="weights.bin")
        proto.graph.initializer.append(weight)
    path = tmp_path / "small.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def target(tmp_path):
    """A device that computes fast, and one that reads its memory fast."""
    devices = (
        Device("cpu:0", 1 << 30, operations_per_second=1e12, memory_bytes_per_second=2e9, kernel_seconds=1e-7),
        Device("cuda:0", 1 << 30, operations_per_second=2e10, memory_bytes_per_second=1e11, kernel_seconds=1e-7),
    )
    links = tuple(Link(a.id, b.id, 2e-3, 1e11) for a in devices for b in devices if a is not b)
    path = tmp_path / "target.toml"
    path.write_text(format_target(Target(devices, links)))
    return path


STATE = ("--state", "present_0=past_0")
SIZES = ("--shape", "batch=1,seq=1,past=128=100", "--shape", "batch=1,seq=128,past=0")


def test_a_pair_of_plans_beats_each_device_where_one_computes_and_the_other_reads_fast(run_cli, decoder, target):
    ran = run_cli("plan", decoder, "--target", target, "--effort", "low", "--json", *STATE, *SIZES)
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    assert len(plan["others"]) == 1
    best, *others = plan["sets"]
    assert best["plans"] == ["cuda:0", "cpu:0"]
    alone = {item["name"]: item for item in others if item["devices"] == 1}
    assert alone.keys() == {"cpu:0", "cuda:0"}
    token, prompt = best["steps"]
    assert (token, prompt) == (alone["cuda:0"]["steps"][0], alone["cpu:0"]["steps"][1])
    assert best["interval_seconds"] == pytest.approx((100 * token + prompt + 2 * best["move_seconds"]) / 101)
    assert best["move_seconds"] > 0
    assert all(best["interval_seconds"] < item["interval_seconds"] for item in others)
    assert best["peak_bytes"] >= 2 * WIDTH * WIDTH * 4


def test_the_table_has_a_column_for_each_size_and_says_what_each_set_takes_next_to_the_best(run_cli, decoder, target):
    ran = run_cli("plan", decoder, "--target", target, "--effort", "low", *STATE, *SIZES)
    assert ran.code == 0, ran.err
    text = ran.out.partition("sets of plans:\n")[2].splitlines()
    assert text[:2] == ["size 1: of batch=1, seq=1, past=128", "size 2: of batch=1, seq=128, past=0"]
    assert text[2].split("  ")[0] == "plan for size 1"
    assert text[3].split()[:2] == ["cuda:0", "cpu:0"]
    assert " 1.00 " in text[3]
    assert ran.out.count("a request is of") == 2, "each size has its own strategies before"


def test_of_a_decoder_it_shows_the_time_to_the_first_token_and_tokens_a_second(run_cli, tmp_path, target):
    path = tmp_path / "decoder.onnx"
    text = """<ir_version: 8, opset_import: ["": 17]>
        small (int64[batch, seq] tokens, float[batch, 1, past, 64] past)
            => (float[b, n, 64] y, float[b, 1, t, 64] present) <int64[1] axis = {1}> {
            h = Gather(table, tokens)
            one = Unsqueeze(h, axis)
            present = Concat<axis=2>(past, one)
            all = ReduceMean<axes=[1, 2], keepdims=0>(present)
            row = Unsqueeze(all, axis)
            y = Add(h, row)
        }"""
    proto = parser.parse_model(text)
    proto.graph.initializer.append(onnx.helper.make_tensor("table", onnx.TensorProto.FLOAT, [10, 64], [0.5] * 640))
    onnx.save(proto, path)
    ran = run_cli("plan", path, "--target", target, "--effort", "low", "--llm")
    assert ran.code == 0, ran.err
    header = next(line for line in ran.out.splitlines() if line.startswith("tokens"))
    assert header.split("  ")[0] == "tokens"
    assert "tokens/s" in header
    assert "first token" in header
    plan = onnxplace.plan(path, target=target, effort="low", llm=True)
    assert plan.request == "of batch=1, seq=1, past=128"
    assert plan.others[0].request == "of batch=1, seq=128, past=0"
    assert plan.sets
    assert all(len(item.steps) == 2 and math.isfinite(item.step_seconds) for item in plan.sets)


def test_machines_are_chosen_by_the_longest_step_of_all_sizes(run_cli, decoder):
    options = ("plan", decoder, "--machine", "AI-PC-NPU", "--machine", "T4", "--effort", "low", *STATE, *SIZES)
    data = json.loads(run_cli(*options, "--json").out)
    rows = {row["machine"]: row["strategy"] for row in data["rows"]}
    assert rows.keys() == {"Intel-AI-PC-NPU", "T4"}
    assert all(row["step_seconds"] == max(row["steps"]) for row in rows.values())
    least = min(row["step_seconds"] for row in rows.values())
    ran = run_cli(*options, "--latency", f"{least * 1e6 * 0.9:.3f}us")
    assert ran.code == 3
    text = run_cli(*options).out
    assert "a request is of batch=1, seq=1, past=128 or of batch=1, seq=128, past=0" in text


def test_plans_that_fit_no_device_together_are_not_a_set(run_cli, decoder, target):
    small = f"{WIDTH * WIDTH * 4 * 5 // 2 + (1 << 20)}"
    ran = run_cli(
        "plan", decoder, "--target", target, "--effort", "low", "--max-memory", small, "--json", *STATE, *SIZES
    )
    plan = json.loads(ran.out)
    assert all(item["peak_bytes"] <= int(small) for item in plan["sets"])
    none = run_cli("plan", decoder, "--target", target, "--effort", "low", "--max-memory", "10000", *STATE, *SIZES)
    assert none.code == 3
    assert "no plans take all sizes together" in none.out


def test_saved_plans_for_several_sizes_are_compared(run_cli, decoder, target, tmp_path):
    for name in ("a", "b"):
        saved = run_cli("plan", decoder, "--target", target, "--effort", "low", "--json", *STATE, *SIZES)
        (tmp_path / name).write_text(saved.out)
    ran = run_cli("plan", "--diff", tmp_path / "a", tmp_path / "b")
    assert ran.code == 0, ran.err


def test_with_fixed_sizes_each_size_has_a_plan_of_its_own(run_cli, model_file):
    options = (
        "plan",
        model_file,
        "--devices",
        "cpu:0,cpu:1",
        "--effort",
        "low",
        "--shape",
        "batch=2,3",
        "--fixed-sizes",
    )
    ran = run_cli(*options, "--json")
    assert ran.code == 0, ran.err
    sets = json.loads(ran.out)["sets"]
    assert sets
    assert all(len(item["steps"]) == 2 and min(item["steps"]) > 0 for item in sets)
    loose = json.loads(run_cli(*options[:-1], "--json").out)["sets"]
    assert sets[0]["peak_bytes"] > loose[0]["peak_bytes"], "the weights of two plans"
