"""The models of benchmarks/streaming.py are those that were published, and ONNX Runtime runs them."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for what benchmarks share with each other

from benchmarks import _streaming_models as models


@pytest.mark.parametrize(("name", "sizes"), [("llama-3-8b", models.LLAMA_3_8B), ("sdxl", models.SDXL)])
def test_models_have_as_many_parameters_as_published(name, sizes, tmp_path):
    parameters = models.write_model(sizes, tmp_path / "model.onnx", np.float16, holes=True)
    assert parameters == pytest.approx(models.PUBLISHED_PARAMETERS[name], rel=0.03)
    assert (tmp_path / "model.onnx.data").stat().st_size == pytest.approx(2 * parameters, rel=0.001)


def open_model(sizes, folder):
    models.write_model(sizes, folder / "model.onnx", np.float32)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, feeds)))


def test_a_step_of_the_decoder_after_cached_tokens_gives_what_all_tokens_give(tmp_path):
    run, sizes = open_model(models.SMALL_DECODER, tmp_path), models.SMALL_DECODER
    feeds = sizes.feeds(2, 5, 0)
    whole = run(feeds)["logits"]
    first = run({name: value[:, :4] if name.endswith("_ids") else value for name, value in feeds.items()})
    caches = {name: first[name.replace("past_key_values", "present")] for name in sizes.caches}
    step = run({"input_ids": feeds["input_ids"][:, 4:], "position_ids": feeds["position_ids"][:, 4:], **caches})
    np.testing.assert_allclose(step["logits"], whole[:, 4:], atol=1e-4)


def test_the_unet_returns_a_picture_of_noise(tmp_path):
    run, sizes = open_model(models.SMALL_UNET, tmp_path), models.SMALL_UNET
    random = np.random.default_rng(0)
    shapes = {"latents": (4, 16, 16), "time": (32,), "added": (sizes.added,), "text": (77, sizes.cross)}
    feeds = {name: random.standard_normal((2, *shape), np.float32) for name, shape in shapes.items()}
    noise = run(feeds)["noise"]
    assert noise.shape == (2, 4, 16, 16)
    assert 0.1 < noise.std() < 10
