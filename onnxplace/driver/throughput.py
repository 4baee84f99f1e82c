"""Choose how to use several devices for many requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxplace.driver.sharding import PlacedModel
from onnxplace.driver.strategies import (
    InfeasibleStrategy,
    Kind,
    Prediction,
    list_strategies,
    predict_fitting,
)
from onnxplace.errors import Diagnostic, Figure
from onnxplace.evaluation import RateTrial
from onnxplace.facts import Placement, Profile, Routes
from onnxplace.model import Model
from onnxplace.pipeline import Observer, PassSpec, Pipeline, Timing, format_pipeline, make_pass, parse_pipeline
from onnxplace.state import State
from onnxplace.utils import budget_clock

# A trial costs some seconds each.
MAX_TRIED = 4
# Strategies that the prediction puts this far behind are not tried, unless they are the best of their kind.
TRIED_RATIO = 1.1
# Kinds of which the best one is always tried: the costs of nodes do not know how busy devices slow each other down.
TRIED_KINDS: tuple[Kind, ...] = ("copies", "stages")
# Predictions in the note.
MAX_LISTED_STRATEGIES = 5
# A plain session is clearly faster below this ratio of intervals; it was not timed in the same turns.
CLEAR_PLAIN_RATIO = 0.9
# Models above this size are not sharded by default: that takes a minute or more.
MAX_SHARDED_NODES = 50_000


@dataclass(frozen=True)
class Candidate:
    """A strategy, placed, that is ready to be written."""

    name: str
    kind: Kind
    placed: PlacedModel


def place_for_throughput(
    steps: Pipeline, state: State, first: int, *, may_shard: bool, observer: Observer | None
) -> tuple[list[Candidate], tuple[Timing, ...]]:
    """Return the strategies that are worth a trial, the best by prediction first.

    Copies of the model on all devices need no transfer and no balance: where they fit, copies of stages and sharding
    are not considered. With carried states, whose requests stay on the first route, there are no copies.

    Args:
        steps: The default pipeline, with the placer `stages`.
        state: A profiled model.
        first: Position of the pass after `profile`.
        may_shard: Whether operators may be split.
        observer: Called before each strategy.

    Raises:
        InfeasibleError: nothing fits; the error is that of the stages.
    """
    began = budget_clock()
    front, place, stages = cut_specs(steps, first)
    strategies = list_strategies(
        state.target,
        place,
        stages,
        is_sharding_allowed=may_shard and len(state[Profile].graph) <= MAX_SHARDED_NODES,
        are_copies_allowed=not state[Model].states,
    )
    simple = [item for item in strategies if item.kind in ("one device", "copies", "stages")]
    others = [item for item in strategies if item not in simple]
    results = list(predict_fitting(simple, state, observer))
    if not any(_covers_all_devices(item) for item in results):
        results += predict_fitting(others, state, observer)
    fitting = sorted((item for item in results if isinstance(item, Prediction)), key=_rank)
    if not fitting:
        raise next(
            item.problem for item in results if isinstance(item, InfeasibleStrategy) and item.strategy.kind == "stages"
        )
    notes = [_describe_predictions(fitting), *_describe_states(state)]
    candidates = [make_candidate(item, steps, front, state, notes) for item in _choose_tried(fitting)]
    return candidates, (Timing("strategies", budget_clock() - began),)


def cut_specs(steps: Pipeline, first: int) -> tuple[list[PassSpec], list[PassSpec], PassSpec]:
    """Return the passes up to `profile`, those before the placer, and the placer."""
    emit: Any = steps.passes[-1]
    specs = [*parse_pipeline(emit.pipeline)]
    placer = next(index for index, step in enumerate(steps.passes) if Placement in step.provides)
    return specs[:first], specs[first:placer], specs[placer]


def _covers_all_devices(result: Prediction | InfeasibleStrategy) -> bool:
    """Return whether a result is a copy of the whole model on every device."""
    return (
        isinstance(result, Prediction)
        and result.strategy.everywhere
        and result.devices == len(result.state.target.devices)
    )


def _rank(prediction: Prediction) -> float:
    return prediction.interval_seconds


def _choose_tried(fitting: Sequence[Prediction]) -> list[Prediction]:
    """Return the best by prediction, the best of some kinds, and close ones."""
    chosen = [fitting[0]]
    for kind in TRIED_KINDS:
        best = next((item for item in fitting if item.strategy.kind == kind), None)
        if best is not None and best not in chosen:
            chosen.append(best)
    limit = fitting[0].interval_seconds * TRIED_RATIO
    chosen += [item for item in fitting if item not in chosen and item.interval_seconds <= limit]
    return chosen[:MAX_TRIED]


def _describe_predictions(fitting: Sequence[Prediction]) -> Diagnostic:
    """Return the note that lists what was considered."""
    texts = [f"{item.strategy.name}: {format_rate(item.interval_seconds)}" for item in fitting[:MAX_LISTED_STRATEGIES]]
    more = [f"{len(fitting) - MAX_LISTED_STRATEGIES} more"] if len(fitting) > MAX_LISTED_STRATEGIES else []
    message = f"requests per second by prediction: {'; '.join(texts + more)}"
    figures = tuple(Figure(item.strategy.name, item.interval_seconds) for item in fitting)
    return Diagnostic("P043", message, where="throughput", figures=figures)


def format_rate(interval_seconds: float) -> str:
    """Format a time between results as a number of requests per second.

    >>> format_rate(0.01)
    '100'
    """
    return f"{1 / interval_seconds:.4g}" if interval_seconds > 0 else "no bound"


def make_candidate(
    prediction: Prediction, steps: Pipeline, front: Sequence[PassSpec], profiled: State, notes: Sequence[Diagnostic]
) -> Candidate:
    """Return the pipeline and the state of a prediction, ready to be written.

    Args:
        prediction: Of a strategy.
        steps: The default pipeline.
        front: The passes up to `profile`.
        profiled: The state before the strategy's passes.
        notes: For the user.
    """
    emit: Any = steps.passes[-1]
    specs = [*front, *prediction.specs, PassSpec("emit")]
    own = tuple(make_pass(spec.name, spec.options) for spec in prediction.specs)
    emit = replace(emit, pipeline=format_pipeline(specs))
    state = prediction.state
    if not state[Routes].routes:
        state = state.without(Routes)
    placed = PlacedModel(
        Pipeline((*steps.passes[: len(front)], *own, emit)),
        state.with_notes(*notes),
        profiled if prediction.strategy.is_rewritten else None,
    )
    return Candidate(prediction.strategy.name, prediction.strategy.kind, placed)


def describe_kept(candidates: Sequence[tuple[str, float]], in_flight: int, kept: str) -> Diagnostic:
    """Return the note that lists what a trial measured: names and seconds between results."""
    texts = [f"{name}: {format_rate(seconds)}" for name, seconds in candidates]
    message = f"requests per second, measured with {in_flight} in flight: {'; '.join(texts)}; kept {kept}"
    return Diagnostic("P044", message, where="throughput")


def report_plain_session(trial: RateTrial | None, predicted_seconds: float) -> list[Diagnostic]:
    """Return a note if a trial measured that one session of ONNX Runtime with all cores is clearly faster.

    Other programs slow several devices more than one session: if they did, it is also faster than `predicted_seconds`.
    """
    if trial is None or not 0 < trial.plain_seconds < CLEAR_PLAIN_RATIO * trial.interval_seconds:
        return []
    if trial.is_doubtful and trial.plain_seconds > predicted_seconds:
        return []
    rates = f"{format_rate(trial.plain_seconds)} requests/s, this bundle {format_rate(trial.interval_seconds)}"
    message = f"one onnxruntime session with all cores is faster: {rates}"
    hint = "run the model itself with onnxruntime, or join small requests to batches (docs/serving.md)"
    return [Diagnostic("P048", message, where="throughput", hint=hint)]


def _describe_states(state: State) -> list[Diagnostic]:
    """Return a note for models with carried states: requests of one conversation follow one another."""
    if not state[Model].states:
        return []
    message = (
        "requests that pass states on follow one another: the predicted rate needs several conversations at a time"
    )
    hint = "session.conversation() begins one; have as many in progress as there are devices"
    return [Diagnostic("P045", message, where=state[Model].name, hint=hint)]
