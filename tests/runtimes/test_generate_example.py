"""The example `generate.py` streams what one session of ONNX Runtime generates, greedily and by chance."""

import itertools
import json
import re

import numpy as np
import onnx
import pytest

import generate as example
import onnxplace
from generate import (
    ByteTokenizer,
    NumberTokenizer,
    find_tokenizer,
    make_chooser,
    open_tokenizer,
    read_ends,
    stream_text,
)
from tests.support.decoders import SIZES, optimum_decoder

PIPELINE = "profile{estimate=true},coplace{join=never},m-etf,split,emit"
GREEDY = make_chooser(0, 1, None)


@pytest.fixture(scope="module")
def model():
    return optimum_decoder("total_sequence_length", seed=3)


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("generate") / "model.bundle"
    return onnxplace.compile(model, path, devices="cpu:0,cpu:1", llm=True, pipeline=PIPELINE, trial=False)


def generate_whole(model, prompt, choose, count):
    """Generate with one session that computes all tokens anew for each one, without a cache."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    empty = np.zeros((1, SIZES["heads"], 0, SIZES["hidden"] // SIZES["heads"]), np.float32)
    cache = {item.name: empty for item in session.get_inputs() if item.name.startswith("past")}
    tokens = list(prompt)
    for _ in range(count):
        ids = np.array([tokens])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(len(tokens))[None]}
        tokens.append(choose(session.run(["logits"], {**feeds, **cache})[0][0, -1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("options", [(0, 1, None), (1.0, 20, 5)], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_one_session_without_a_cache(bundle, model, options):
    prompt = [7, 42, 99, 3]
    with onnxplace.InferenceSession(bundle) as session:
        ids = example.generate(bundle, session, prompt, make_chooser(*options))
        tokens = list(itertools.islice(ids, 12))
    assert tokens == generate_whole(model, prompt, make_chooser(*options), 12)
    assert len(set(tokens)) > 3, "tokens that are all the same prove little"


def test_a_chooser_takes_the_likeliest_or_samples_by_probability():
    logits = np.log(np.array([0.5, 0.3, 0.2, 1e-9], np.float32))
    assert GREEDY(logits) == 0
    counts = np.bincount([choose(logits) for choose in [make_chooser(1.0, 3, 0)] for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2, 0], atol=0.03)
    assert {make_chooser(1.0, 1, seed)(logits) for seed in range(20)} == {0}


def test_a_command_streams_numbers_reproducibly_and_stops_at_the_end_token(bundle, model, capsys):
    expected = generate_whole(model, [7, 42], GREEDY, 6)
    example.main([str(bundle.path), "--prompt", "7 42", "--tokens", "6"])
    printed = capsys.readouterr()
    assert printed.out == " ".join(map(str, [7, 42, *expected]))
    plan = r"( by plan [\d+]+)?"
    assert re.fullmatch(rf"\n6 tokens, the first after \d+ ms{plan}, then [\d.]+ tokens/s{plan}\n", printed.err)
    end = next(token for token in expected if expected.index(token) > 1)
    (bundle.path.parent / "config.json").write_text(json.dumps({"eos_token_id": [end]}))
    try:
        example.main([str(bundle.path), "--prompt", "7 42", "--tokens", "6"])
    finally:
        (bundle.path.parent / "config.json").unlink()
    assert capsys.readouterr().out == " ".join(map(str, [7, 42, *expected[: expected.index(end)]]))


def test_the_speed_tells_the_first_token_from_the_others():
    assert example.describe_speed(1.0, [], []) == "0 tokens"
    assert example.describe_speed(1.0, [1.25], []) == "1 tokens, the first after 250 ms"
    text = "3 tokens, the first after 250 ms by plan 1, then 4.0 tokens/s by plan 0+1"
    assert example.describe_speed(1.0, [1.25, 1.5, 1.75], [1, 1, 0]) == text


def test_the_plan_of_each_call_is_kept(bundle):
    plans = []
    with onnxplace.InferenceSession(bundle) as session:
        list(itertools.islice(example.generate(bundle, session, [7, 42], GREEDY, plans), 3))
    assert len(plans) == 3
    assert set(plans) <= set(range(len(bundle.plans)))


def test_text_without_a_tokenizer_is_bytes(bundle, capsys):
    example.main([str(bundle.path), "--prompt", "Once", "--tokens", "5", "--temperature", "1", "--seed", "2"])
    first = capsys.readouterr().out
    example.main([str(bundle.path), "--prompt", "Once", "--tokens", "5", "--temperature", "1", "--seed", "2"])
    assert capsys.readouterr().out == first
    assert first.startswith("Once")


def test_a_character_of_several_tokens_is_shown_whole():
    tokens = "aé€".encode()
    assert list(stream_text(ByteTokenizer(), iter(tokens))) == ["a", "é", "€", ""]
    assert "".join(stream_text(ByteTokenizer(), iter(tokens[:-1]))) == "aé\ufffd"
    assert ByteTokenizer().decode([72, 300]) == "H<300>"
    assert NumberTokenizer().encode("7 42") == [7, 42]


def test_the_tokenizer_next_to_the_bundle_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2}, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.save(str(tmp_path / "tokenizer.json"))
    folder = find_tokenizer(tmp_path / "onnx" / "model.bundle")
    assert folder == tmp_path
    assert find_tokenizer(tmp_path / "other" / "model.bundle") == tmp_path / "other"
    tokenizer = open_tokenizer(folder, "the cat")
    assert tokenizer.encode("the cat") == [0, 1]
    assert tokenizer.decode([1, 0]) == "cat the"


def test_the_package_that_a_tokenizer_needs_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="needs: pip install tokenizers"):
        open_tokenizer(tmp_path, "x")
    assert read_ends(tmp_path) == set()


def test_other_bundles_are_refused_with_what_to_do(tmp_path, model, capsys):
    onnx.save(model, tmp_path / "model.onnx")
    shape = {"batch_size": 1, "sequence_length": 1, "past_sequence_length": 4, "total_sequence_length": 5}
    onnxplace.compile(tmp_path / "model.onnx", devices="cpu:0", shape=shape, pipeline=PIPELINE, trial=False)
    for name, words in (("model.bundle", "compile the decoder with --llm\n"), ("none.bundle", "not a bundle")):
        with pytest.raises(SystemExit) as ended:
            example.main([str(tmp_path / name)])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err


def test_an_error_while_generating_has_a_line_of_its_own(bundle, capsys):
    with pytest.raises(SystemExit) as ended:
        example.main([str(bundle.path), "--prompt", "7 999999"])
    assert ended.value.code == 4
    assert re.match(r"\nerror\[X001\] cpu:\d: segment", capsys.readouterr().err)
