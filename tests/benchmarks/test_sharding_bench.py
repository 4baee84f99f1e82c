"""What benchmarks/sharding.py says of GPUs: the choice of layouts promises what the simulator gives."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for what benchmarks share with each other

from benchmarks import _sharding_models as models, sharding
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states


@pytest.mark.parametrize(
    ("name", "tokens", "past", "link", "is_one_message"),
    [
        ("llama-70b", 2048, 0, "pcie", True),
        ("llama-7b", 2048, 0, "pcie", False),
        ("llama-7b", 1, 2048, "nvlink", True),
        ("bert-large", 2048, 0, "nvlink", True),
    ],
)
def test_a_choice_promises_what_the_simulator_gives(name, tokens, past, link, is_one_message, tmp_path, monkeypatch):
    monkeypatch.setitem(models.TRANSFORMERS, name, replace(models.TRANSFORMERS[name], layers=3))
    states = models.write_transformer(name, tmp_path / "model.onnx", 1, tokens, past)
    bound = bind(load(tmp_path / "model.onnx"), {"past": past} if past else {}, {})
    model = bind_states(bound, {output: source for source, output in states.items()})
    for ways in (4, 8):
        promised, simulated = sharding.speed_up(model, sharding.make_target(ways, link, is_one_message))
        assert promised > 1.05
        assert simulated == pytest.approx(promised, rel=0.03)
