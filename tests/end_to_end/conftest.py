"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from onnx import ModelProto

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from tests.end_to_end.split_checks import ALTERNATING, Check, parsed
from tests.support.random_models import Feeds, reference, run_plain
from tests.support.random_placements import assert_same, compiled_with, run_together


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Compile a model with nodes alternating between two devices, plain and optimised; compare all outputs."""

    def run(
        model: str | ModelProto,
        *feeds: Feeds,
        dimensions: Mapping[str, int] = MappingProxyType({}),
        optimized: tuple[bool, ...] = (False, True),
    ) -> list[Bundle]:
        proto = parsed(model)
        expected = reference(proto, feeds)
        bundles = []
        for choice in optimized:
            folder = tmp_path / str(choice)
            bundle = compiled_with(proto, ALTERNATING, folder, optimized=choice, dimensions=dimensions)
            assert_same(run_together(bundle, feeds), expected)
            assert_same(run_plain(bundle.file(WHOLE_MODEL_FILE), feeds), expected)
            bundles.append(bundle)
        return bundles

    return run
