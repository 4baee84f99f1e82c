"""Damaged models either compile, or are refused with an error that says what to do."""

import random
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st
from onnx import ModelProto

import onnxplace
from onnxplace import OnnxplaceError
from onnxplace.feeds.dimensions import dimension_keys, symbols_of_dimension
from onnxplace.model.loading import load
from onnxplace.model.model import declaration_of
from onnxplace.target.target import Device, Target
from tests.support.broken_models import alter_model, build_originals, damage_bytes
from tests.support.fuzzing import fuzzed

PIPELINE = "optimize,profile{estimate=true},coplace{join=never},m-topo,split,emit"
TARGET = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
ORIGINALS = build_originals()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "weights.data").write_bytes(bytes(1200))
    return path


def compile_bytes(data: bytes, folder: Path) -> None:
    """Compile a model for two devices with all its symbolic dimensions 2."""
    path = folder / "m.onnx"
    path.write_bytes(data)
    model = load(path)
    keys = {key for value in model.inputs for key, size in dimension_keys(declaration_of(value, model)) if size is None}
    sizes = {name: 2 for key in keys for name in symbols_of_dimension(key)}
    onnxplace.compile(path, folder / "bundle", target=TARGET, shape=sizes, pipeline=PIPELINE, trial=False, force=True)


def require_clean_outcome(data: bytes, folder: Path) -> None:
    """Fail unless a model compiles, or is refused as bad input or infeasible."""
    try:
        compile_bytes(data, folder)
    except OnnxplaceError as problem:
        if problem.exit_code not in (2, 3):
            raise


@pytest.mark.parametrize("model", ORIGINALS, ids=["plain", "subgraphs", "functions", "others", "layers"])
def test_the_models_are_valid_before_they_are_damaged(folder: Path, model: ModelProto):
    compile_bytes(model.SerializeToString(), folder)


@fuzzed
@given(st.integers(0, len(ORIGINALS) - 1), st.integers(0, 2**32 - 1))
def test_a_model_with_altered_fields_compiles_or_is_refused(folder: Path, index: int, seed: int):
    require_clean_outcome(alter_model(ORIGINALS[index], random.Random(seed)).SerializeToString(), folder)


@fuzzed
@given(st.integers(0, len(ORIGINALS) - 1), st.integers(0, 2**32 - 1))
def test_a_model_with_altered_bytes_compiles_or_is_refused(folder: Path, index: int, seed: int):
    require_clean_outcome(damage_bytes(ORIGINALS[index].SerializeToString(), random.Random(seed)), folder)


@fuzzed
@given(st.binary(max_size=200))
@example(b"\x08\x09\x3a\x00")
def test_any_bytes_are_refused(folder: Path, data: bytes):
    require_clean_outcome(data, folder)
