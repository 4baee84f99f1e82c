"""A decoder whose prompts and tokens take different plans, with its cache whole or split over devices."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxplace
from onnxplace.bundle.manifest import SizeRecord
from onnxplace.driver.join_plans import join_plans
from tests.support.chains import cached_decoder

TOKEN, PROMPT, WIDTH = 1, 6, 64
SIZES = [
    SizeRecord(dimensions={"seq": TOKEN, "past": 8}, seconds=(1e-3, 1e3), weight=100),
    SizeRecord(dimensions={"seq": PROMPT, "past": 0}, seconds=(1e3, 1e-3), weight=1),
]
START = {"past": np.zeros((1, 4, 0, 16), "f4")}


def compile_alone(folder, name, device=""):
    """Compile the decoder for one device, or with its operators and cache split over two."""
    coplace, shard = "coplace,fuse", "shard{ways=2,weights=least},"
    if device:
        file = folder / f"{name}.json"
        file.write_text(json.dumps({".*": device}))
        coplace, shard = f"coplace{{join=never,device_map={json.dumps(str(file))}}}", ""
    return onnxplace.compile(
        cached_decoder(),
        folder / name,
        devices="cpu:0,cpu:1",
        shape={"seq": 1, "past": 8},
        state={"present": "past"},
        pipeline=f"optimize,profile{{estimate=true}},{shard}{coplace},m-etf,split,emit",
    )


@pytest.fixture(scope="module", params=["whole to whole", "whole to split", "split to whole", "split to split"])
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    devices = {"whole": "cpu:1", "split": ""}
    first, second = (devices[word] for word in request.param.split(" to "))
    bundles = [compile_alone(folder, "first", first), compile_alone(folder, "second", second)]
    for plan, device in zip(bundles, (first, second)):
        assert bool(device) != bool(plan.manifest.sharding and plan.manifest.sharding.states)
    return onnxplace.load(join_plans(bundles, {}, SIZES).path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "decoder.onnx"
    onnx.save(cached_decoder(), file)
    return onnxruntime.InferenceSession(file)


def require_close(output, reference):
    np.testing.assert_allclose(output, reference, rtol=1e-4, atol=1e-5)


def test_a_conversation_that_switches_a_hundred_times_gives_the_tokens_of_the_whole_model(bundle, whole):
    random, past, plans = np.random.default_rng(0), START["past"], []
    with onnxplace.InferenceSession(bundle, warmup=True) as session, session.conversation() as conversation:
        for number in range(101):
            x = random.standard_normal((1, (TOKEN, PROMPT)[number % 2], WIDTH)).astype("f4")
            y, past = whole.run(["y", "present"], {"x": x, "past": past})
            result = conversation.run_timed({"x": x, **(START if number == 0 else {})})
            plans.append(result.plan)
            require_close(result.outputs["y"], y)
        assert plans[1:] == [(number + 1) % 2 for number in range(100)]
        require_close(conversation.read_states()["past"], past)


def test_a_prompt_and_tokens_move_the_cache_once(bundle, whole):
    random, past = np.random.default_rng(1), START["past"]
    sizes = [PROMPT, *[TOKEN] * 5]
    with onnxplace.InferenceSession(bundle, warmup=True) as session:
        plans = []
        for number, size in enumerate(sizes):
            x = random.standard_normal((1, size, WIDTH)).astype("f4")
            y, past = whole.run(["y", "present"], {"x": x, "past": past})
            result = session.run_timed({"x": x, **(START if number == 0 else {})})
            plans.append(result.plan)
            require_close(result.outputs["y"], y)
    assert plans == [1, 0, 0, 0, 0, 0]


def test_states_are_fed_and_returned_whole_by_any_plan(bundle, whole):
    random = np.random.default_rng(2)
    with onnxplace.InferenceSession(bundle, warmup=True) as session:
        for size in (PROMPT, TOKEN):
            past = random.standard_normal((1, 4, 5, 16)).astype("f4")
            x = random.standard_normal((1, size, WIDTH)).astype("f4")
            expected = whole.run(["y", "present"], {"x": x, "past": past})
            for output, reference in zip(session.run(["y", "present"], {"x": x, "past": past}), expected, strict=True):
                require_close(output, reference)
            require_close(session.read_states()["past"], expected[1])
