"""Forced sharding: every strategy of every node of a model, run in plain ONNX Runtime against the whole model."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from onnxplace.model.lineage import output_lineages
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.rules.layouts import Division, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from tests.support.conformance import Case, PlainSession, case, fed_names, first_line, surrounded
from tests.support.shardings import ReturningWriter, complete_choice, is_in_runs

DIVISIONS = {
    "2 ways": Division((1.0, 1.0)),
    "3 ways": Division((1.0, 1.0, 1.0)),
    "2 ways, 3:1": Division((3.0, 1.0)),
    "4 ways": Division((1.0, 1.0, 1.0, 1.0)),
    "6 ways": Division((1.0,) * 6),
    "8 ways": Division((1.0,) * 8),
}
TOLERANCES = {"float64": 1e-11, "float32": 2e-5, "float16": 1e-2, "bfloat16": 4e-2}
"""By element type, relative to the largest magnitude: parts of a sum are added in another order."""
OPSETS = (26, 21, 16, 11)
"""Tried from the latest that ONNX Runtime 1.31 supports, for models of opsets that it does not support."""
ALTERS_INPUTS = "training_mode"
"""In names of cases: ONNX Runtime writes statistics into inputs, which copies of a node share in one session."""
MAX_NODES_ALONE = 6
"""In larger models, all nodes take another strategy at once, and only a failure is taken apart."""

Feeds = Mapping[str, Any]


class NotComparable(Exception):  # noqa: N818 - it is no error of the model
    """ONNX Runtime does not run the whole model, or its results are random."""


@dataclass(frozen=True)
class Trial:
    """One sharded model that was run."""

    division: str
    nodes: tuple[str, ...]
    """Operators that were split."""
    problem: str = ""
    """What went wrong; empty if its outputs are those of the whole model."""


@dataclass(frozen=True)
class ShardOutcome:
    """What became of a case of the conformance suite."""

    name: str
    kind: str
    refused: bool = False
    """ONNX Runtime does not run the whole model, or its results are random."""
    tried: int = 0
    """Strategies other than the whole one, over all divisions and forms of the model."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """Operator -> strategies tried."""
    failures: Sequence[str] = ()


def shard_case(kind: str, name: str) -> ShardOutcome:
    """Return what becomes of a case: all strategies, in all divisions and forms of the model."""
    found = case(kind, name)
    if found is None or ALTERS_INPUTS in name:
        return ShardOutcome(name, kind, refused=True)
    counts: Counter[str] = Counter()
    failures, ran = [], False
    for form, model, feeds in forms(found):
        try:
            trials = list(try_strategies(model, feeds))
        except NotComparable:
            continue
        ran = True
        for trial in trials:
            # The Identities around a model are tried too, but say nothing of the case.
            counts.update(name for name in trial.nodes if form == "as it is" or name != "Identity")
            if trial.problem:
                failures.append(f"{form}, {trial.division}: {trial.problem}")
    return ShardOutcome(name, kind, not ran, sum(counts.values()), dict(counts), failures)


def forms(found: Case) -> Iterator[tuple[str, ModelProto, list[Feeds]]]:
    """Yield the forms of a case: as it is, with Identities around it, and with all inputs but the first as weights."""
    model = lower_opset(found.model)
    names = fed_names(model)
    feeds = [dict(zip(names, given)) for given, _ in found.data_sets]
    yield "as it is", model, feeds
    if found.kind == "light":
        return
    if (around := _surround(model)) is not None:
        yield "surrounded", around, feeds
    fixed = with_weights(model, feeds[0]) if feeds else None
    if fixed is not None:
        rest = [{name: item[name] for name in fed_names(fixed)} for item in feeds[:1]]
        around = _surround(fixed)
        yield "with weights", fixed if around is None else around, rest


def _surround(model: ModelProto) -> ModelProto | None:
    """Return the model with Identities around it; None if ONNX Runtime has none for its types."""
    around = surrounded(model)
    return around if around is not None and _is_supported(around) else None


def _is_supported(model: ModelProto) -> bool:
    try:
        PlainSession(model, optimized=False)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return False
    return True


def lower_opset(model: ModelProto) -> ModelProto:
    """Return the model in the latest of some opsets that ONNX Runtime has kernels for.

    Only the whole and the sharded model are compared, so that small changes of operators between opsets do not matter.
    """
    latest = next((item.version for item in model.opset_import if item.domain == ""), 0)
    for version in (latest, *(version for version in OPSETS if version < latest)):
        result = ModelProto()
        result.CopyFrom(model)
        for item in result.opset_import:
            if item.domain == "":
                item.version = version
        if _is_supported(result):
            return result
    return model


def with_weights(model: ModelProto, feeds: Feeds) -> ModelProto | None:
    """Return the model with all inputs but the first as initializers; None if there are none that can be."""
    arrays = {name: np.asarray(value) for name, value in feeds.items() if isinstance(value, (np.ndarray, np.generic))}
    tensors = [name for name, array in arrays.items() if array.dtype != object]
    moved = [name for name in tensors if name != next(iter(feeds))]
    if not moved:
        return None
    result = ModelProto()
    result.CopyFrom(model)
    result.ir_version = max(model.ir_version, 4)
    kept = [value for value in result.graph.input if value.name not in moved]
    del result.graph.input[:]
    result.graph.input.extend(kept)
    result.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in moved)
    return result


def try_strategies(proto: ModelProto, feeds: Sequence[Feeds], returns_all: bool = False) -> Iterator[Trial]:
    """Yield a trial for each strategy of each node of a model, in each division.

    With `returns_all`, sharded models return all their values, so that these share no memory.

    Raises NotComparable if ONNX Runtime does not run the whole model, or if its results are random.
    """
    model, expected = _run_whole(proto, feeds)
    facts = TensorFacts.of(model)
    for name, division in DIVISIONS.items():
        space = build_space(facts, division)
        alone = list(_alone(space))
        together = list(_together(space))
        if len(model.nodes) <= MAX_NODES_ALONE:
            together = together if len(model.nodes) > 1 else []
            yield from (_try(space, name, forced, feeds, expected, returns_all) for forced in (*alone, *together))
            continue
        in_runs = [forced for forced in alone if any(map(is_in_runs, forced.values()))]
        for forced in (*together, *in_runs):
            trial = _try(space, name, forced, feeds, expected, returns_all)
            yield trial
            if trial.problem:
                singles = ({index: strategy} for index, strategy in forced.items())
                yield from (t for s in singles if (t := _try(space, name, s, feeds, expected, returns_all)).problem)


def _run_whole(proto: ModelProto, feeds: Sequence[Feeds]) -> tuple[Model, list[list[Any]]]:
    if any(lineage.random_nodes for lineage in output_lineages(proto, {}).values()):
        raise NotComparable("its results are random")
    try:
        model = bind(load(proto), {}, dict(feeds[0]))
        return model, _run(model, feeds)
    except Exception as problem:
        raise NotComparable(str(problem)) from problem


def _alone(space: StrategySpace) -> Iterator[dict[int, NodeStrategy]]:
    for index, strategies in enumerate(space.strategies):
        for strategy in strategies[1:]:
            if not is_in_runs(strategy):
                yield {index: strategy}
            elif (choice := complete_choice(space, {index: strategy}, float)) is not None:
                yield dict(enumerate(choice.strategies))


def _together(space: StrategySpace) -> Iterator[dict[int, NodeStrategy]]:
    """Yield choices for all nodes at once, until each strategy of each node was in one."""
    every = [[item for item in strategies if not is_in_runs(item)] for strategies in space.strategies]
    rounds = max(map(len, every), default=1)
    for number in range(rounds if rounds > 1 else 0):
        forced = {}
        for index, strategies in enumerate(every):
            if choice := (number + index) % len(strategies):
                forced[index] = strategies[choice]
        yield forced


def _try(
    space: StrategySpace,
    division: str,
    forced: Mapping[int, NodeStrategy],
    feeds: Sequence[Feeds],
    expected: Sequence[Any],
    returns_all: bool,
) -> Trial:
    nodes = space.facts.model.nodes
    names = tuple(f"{nodes[index].domain}::{nodes[index].op_type}".removeprefix("::") for index in forced)
    try:
        actual = _run(shard(space, forced), feeds, returns_all)
        problems = [text for one, other in zip(expected, actual) if (text := compare(one, other))]
    except Exception as problem:  # noqa: BLE001 - whatever it is, it counts
        if "NOT_IMPLEMENTED" in str(problem) and TensorProto.BFLOAT16 in space.facts.types.values():
            return Trial(division, ())  # on CPUs, ONNX Runtime does not add this type
        problems = [first_line(problem)]
    if not problems:
        return Trial(division, names)
    listed = "; ".join(f"{nodes[i].op_type} {describe(strategy)}" for i, strategy in [*forced.items()][:2])
    return Trial(division, names, f"{len(forced)} nodes, {listed}: {problems[0]}")


def shard(space: StrategySpace, forced: Mapping[int, NodeStrategy]) -> Model:
    """Return the model sharded with these strategies; nodes without one are whole on every device.

    It returns what the last device has.
    """
    strategies = tuple(forced.get(index, options[0]) for index, options in enumerate(space.strategies))
    choice = LayoutChoice(strategies, {}, seconds=0.0, lower_bound_seconds=0.0, weight_bytes=0)
    # Sums in two steps wherever they can be, which also tests the exchange of a direct sum where they cannot.
    costs = ExchangeCosts(
        count=space.division.count,
        latency_seconds=0.0,
        seconds_per_byte=1e-9,
        segment_seconds=0.0,
        copy_seconds_per_byte=0.0,
        kernel_seconds=0.0,
    )
    return ReturningWriter(space, choice, costs, space.division.count - 1).write().model


def describe(strategy: NodeStrategy) -> str:
    """Return the layouts of a strategy."""
    return f"{_words(strategy.inputs)} -> {_words(strategy.outputs)}"


def _words(layouts: Sequence[Layout | None]) -> str:
    return ", ".join(
        "-" if item is None else str(item) if not item.is_split else f"{item.axis}/{item.outer}/{item.blocks}"
        for item in layouts
    )


def _run(model: Model, feeds: Sequence[Feeds], returns_all: bool = False) -> list[list[Any]]:
    returned = {value.name for value in model.outputs}
    values = [name for node in model.nodes for name in node.output if name and name not in returned]
    more = [ValueInfoProto(name=name) for name in values] if returns_all else []
    session = PlainSession(model.whole_proto(more=more), optimized=False)
    names = [value.name for value in model.inputs]
    results = [session.run([item[name] for name in names if name in item]) for item in feeds]
    return [result[: len(model.outputs)] for result in results]


def compare(expected: Any, actual: Any) -> str:
    """Return how a value differs from the expected one; empty if it does not."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return "another number of values"
        return next((text for one, other in zip(expected, actual) if (text := compare(one, other))), "")
    if not isinstance(expected, np.ndarray):
        return "" if type(expected) is type(actual) else f"expected {expected!r}, got {actual!r}"
    if not isinstance(actual, np.ndarray) or expected.dtype != actual.dtype:
        return f"another type: {getattr(actual, 'dtype', type(actual))}"
    if expected.shape != actual.shape:
        return f"expected shape {expected.shape}, got {actual.shape}"
    kind = str(expected.real.dtype)
    if kind not in TOLERANCES:
        one, other = (array.tolist() if array.dtype == object else array.tobytes() for array in (expected, actual))
        return "" if one == other else "other values"
    precise = np.complex128 if np.iscomplexobj(expected) else np.float64
    one, other = expected.astype(precise), actual.astype(precise)
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(other)) or not np.array_equal(
        one[~finite], other[~finite], equal_nan=True
    ):
        return "other infinities or NaN"
    error = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
    scale = float(np.abs(one[finite]).max(initial=0.0))
    return "" if error <= TOLERANCES[kind] * max(scale, 1e-30) else f"error {error:.3g} of {scale:.3g}"


__all__ = [
    "DIVISIONS",
    "NotComparable",
    "ShardOutcome",
    "Trial",
    "compare",
    "describe",
    "forms",
    "shard",
    "shard_case",
    "try_strategies",
]
