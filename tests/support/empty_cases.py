"""ONNX's conformance suite with empty axes: `verify` compares bundles at them, and no process ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from onnx import ModelProto

import onnxplace
from onnxplace.errors import OnnxplaceError
from tests.support.conformance import Case, PlainSession, case, compile_on_two_devices, fed_names, first_line

Axes = Sequence[tuple[str, int]]

# With an empty axis, the first one's initial state contradicts the subgraph, and ONNX Runtime returns the memory behind
# it. The second one stacks a sequence: ONNX Runtime leaves the part of an empty element as the memory was.
UNDEFINED_CASES = {"test_scan_sum", "test_sequence_model5"}


@dataclass(frozen=True)
class EmptyOutcome:
    """What became of a case with empty axes."""

    name: str
    kind: str
    compared: int = 0
    """Choices of empty axes with which bundle and unsplit model compute the same."""
    refused: int = 0
    """Choices that the unsplit model refuses, guards included."""
    failures: Sequence[str] = ()


def empty_case(kind: str, name: str) -> EmptyOutcome:
    """Return what becomes of a case whose inputs have any sizes, on two devices in random order."""
    found = _rule_case(name) if kind == "rules" else case(kind, name)
    if found is None or name in UNDEFINED_CASES:
        return EmptyOutcome(name, kind)
    given = found.data_sets[0][0]
    feeds = dict(zip(fed_names(found.model), given))
    sizeless = replace(found, model=forget_sizes(found.model))
    try:
        PlainSession(sizeless.model).run(given)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return EmptyOutcome(name, kind)
    return _verify(sizeless, feeds)


def _rule_case(name: str) -> Case:
    """Return the model of a sharding rule; some are ONNX Runtime's own operators."""
    from tests.passes.sharding.test_rules import CASES, draw_feeds, parse

    model = parse(CASES[name])
    feeds = draw_feeds(model, CASES[name])
    return Case(name, "rules", model, [([feeds[item] for item in fed_names(model)], ())], 0.0, 0.0)


def _verify(found: Case, feeds: Mapping[str, Any]) -> EmptyOutcome:
    compared = refused = 0
    failures = []
    with TemporaryDirectory(prefix="onnxplace-") as folder:
        try:
            bundle = compile_on_two_devices(found, feeds, Path(folder) / "bundle")
        except OnnxplaceError as problem:  # such as a type that is unknown without sizes
            return EmptyOutcome(found.name, found.kind, failures=[f"compile: {first_line(problem)}"])
        for axes in list_empty_axes(feeds):
            try:
                result = onnxplace.verify(bundle, inputs=make_empty(feeds, axes))
            except OnnxplaceError as problem:
                refused += problem.code in ("M017", "F003", "F002", "F001")
                if problem.code not in ("M017", "F003", "F002", "F001"):
                    failures.append(f"{axes}: {first_line(problem)}")
                continue
            compared += result.equal
            if not result.equal:
                failures.append(f"{axes}: {result}")
    return EmptyOutcome(found.name, found.kind, compared, refused, failures)


def forget_sizes(model: ModelProto) -> ModelProto:
    """Return a model whose inputs have ranks without sizes, and whose other values have no shapes."""
    sizeless = deepcopy(model)
    del sizeless.graph.value_info[:]
    for value in (*sizeless.graph.input, *sizeless.graph.output):
        if value.type.HasField("tensor_type"):
            kind = value.type.tensor_type
            rank = len(kind.shape.dim) if kind.HasField("shape") else None
            kind.ClearField("shape")
            if rank is not None and value in sizeless.graph.input:
                kind.shape.SetInParent()
                for _ in range(rank):
                    kind.shape.dim.add()
    return sizeless


def list_empty_axes(feeds: Mapping[str, Any]) -> Iterator[Axes]:
    """Yield axes to empty: each one alone, all of the same size, all first ones, all second ones, and all."""
    arrays = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
    axes = [(name, axis) for name, value in arrays.items() for axis, size in enumerate(value.shape) if size]
    sizes = sorted({arrays[name].shape[axis] for name, axis in axes})
    choices = [
        *([item] for item in axes),
        *([(name, axis) for name, axis in axes if arrays[name].shape[axis] == size] for size in sizes),
        *([(name, axis) for name, axis in axes if axis == number] for number in range(2)),
        axes,
    ]
    yield from {tuple(item): item for item in choices if item}.values()


def make_empty(feeds: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Return the inputs with these axes empty."""
    emptied = dict(feeds)
    for name, axis in axes:
        emptied[name] = emptied[name].take([], axis).astype(emptied[name].dtype)
    return emptied
