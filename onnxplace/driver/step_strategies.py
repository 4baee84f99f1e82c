"""Compare ways to run a training step on several devices: placed, split operators, replicas, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxplace.driver.sharding import SHARD
from onnxplace.driver.strategies import InfeasibleStrategy, Prediction, Strategy, list_ways, predict_fitting
from onnxplace.driver.throughput import Candidate, cut_specs, make_candidate
from onnxplace.errors import Diagnostic, InfeasibleError, UsageError
from onnxplace.facts import Profile
from onnxplace.model import Model
from onnxplace.pipeline import Observer, PassSpec, Pipeline, Timing
from onnxplace.problem import predict_step_seconds
from onnxplace.report import format_milliseconds
from onnxplace.state import State
from onnxplace.utils import budget_clock

MICROBATCH, PIPELINED = "microbatch", "pipelined"
"""The passes that compute a batch in parts, and that place these."""
COUNTS = (2, 4, 8)
"""Numbers of micro-batches that are considered."""
# A trial costs some seconds each.
MAX_TRIED = 3
# Strategies that the prediction puts this far behind are not tried.
TRIED_RATIO = 1.25
# Predictions in the note.
MAX_LISTED = 6
# Splitting operators and batches of larger models takes minutes.
MAX_NODES = 50_000


@dataclass(frozen=True)
class StepPrediction:
    """A strategy that fits, with its predicted step."""

    prediction: Prediction

    @property
    def name(self) -> str:
        return self.prediction.strategy.name

    @property
    def step_seconds(self) -> float:
        """Return the time from a call to its last output."""
        return predict_step_seconds(self.prediction.state)


def require_training_step(model: Model, profile: Profile | None = None) -> None:
    """Raise UsageError unless a model is a training step; without its profile, a model with states may be one."""
    if profile.training is not None if profile is not None else (model.training is not None or model.states):
        return
    message = "--objective step is for training steps: this model carries no parameters from one call to the next"
    hint = "export it with onnxplace.torch.export_training_step, or name its parameters: --state 'new_*=*'"
    raise UsageError("L067", message, where=model.name, hint=hint)


def suggest_objective(state: State) -> list[Diagnostic]:
    """Return a note if a training step was compiled without comparing micro-batches."""
    if state[Profile].training is None or len(state.target.devices) == 1:
        return []
    message = "this is a training step: micro-batches in stages, and batches split over devices, were not considered"
    return [Diagnostic("L075", message, hint="--objective step compares them, for a fixed size of the batch")]


def list_step_strategies(state: State, place: Sequence[PassSpec]) -> list[Strategy]:
    """Return the strategies for a training step, the simple ones first.

    Micro-batches come with the schedule 1F1B; `list_variants` has others for the best of them.

    Args:
        state: A profiled model.
        place: The passes before the placer, such as `coplace`.
    """
    split, count = PassSpec("split"), len(state.target.devices)
    strategies = [Strategy("one device", "one device", (*place, PassSpec("single"), split))]
    if count == 1:
        return strategies
    strategies.append(Strategy("whole operators placed", "placed", (*place, PassSpec("auto"), split)))
    if len(state[Profile].graph) > MAX_NODES:
        return strategies
    for ways in list_ways(count):
        shard = PassSpec(SHARD, {"ways": str(ways), "exact": "true", "fixed": "true"})
        quick = PassSpec("auto", {"seconds": "0.5"})
        strategies.append(Strategy(f"sharded {ways} ways", "sharded", (shard, *place, quick, split)))
    strategies += [
        _replicas(place, replicas, count // replicas) for replicas in range(2, count + 1) if not count % replicas
    ]
    strategies += [_micro_batches(place, parts, count, "1f1b") for parts in COUNTS]
    return strategies


def _replicas(place: Sequence[PassSpec], replicas: int, stages: int) -> Strategy:
    """Return the strategy of replicas that compute parts of the batch, each in stages if it has several devices."""
    parts = replicas * (1 if stages == 1 else 2 * stages)
    micro_batches = PassSpec(MICROBATCH, {"count": str(parts), "replicas": str(replicas)})
    name = f"{replicas} replicas" + (f" of {stages} stages x {parts // replicas} micro-batches" if stages > 1 else "")
    return Strategy(name, "replicas", _list_specs(micro_batches, place, stages, "1f1b", free=True))


def _micro_batches(place: Sequence[PassSpec], parts: int, stages: int, schedule: str) -> Strategy:
    """Return the strategy of stages that take turns with parts of the batch."""
    micro_batches = PassSpec(MICROBATCH, {"count": str(parts)})
    name = f"{stages} stages x {parts} micro-batches ({schedule})"
    return Strategy(name, "micro-batches", _list_specs(micro_batches, place, stages, schedule))


def _list_specs(
    micro_batches: PassSpec, place: Sequence[PassSpec], stages: int, schedule: str, *, free: bool = False
) -> tuple[PassSpec, ...]:
    """Return the passes of a strategy with micro-batches; `free`: gradients stay with the part that they come from."""
    # Clusters of `fuse` would join parts that belong to different times.
    before = [spec for spec in place if spec.name != "fuse"]
    if free:
        before = [
            PassSpec(spec.name, {**spec.options, "parameters": "free", "join": "never"})
            if spec.name == "coplace"
            else spec
            for spec in before
        ]
    pipelined = PassSpec(PIPELINED, {"stages": str(stages), "schedule": schedule})
    return (micro_batches, *before, pipelined, PassSpec("split"))


def list_variants(best: Strategy, place: Sequence[PassSpec], devices: int) -> Iterator[Strategy]:
    """Yield the strategy of micro-batches with another schedule, and with interleaved stages."""
    parts = int(best.specs[0].options["count"])
    yield _micro_batches(place, parts, devices, "gpipe")
    if parts > devices:
        yield _micro_batches(place, parts, 2 * devices, "1f1b")


def predict_steps(
    state: State, place: Sequence[PassSpec], observer: Observer | None
) -> list[Prediction | InfeasibleStrategy]:
    """Return the prediction of each strategy for a training step, or why it is impossible."""
    results = list(predict_fitting(list_step_strategies(state, place), state, observer))
    parts = [item for item in results if isinstance(item, Prediction) and item.strategy.kind == "micro-batches"]
    if parts:
        best = min(parts, key=lambda item: StepPrediction(item).step_seconds)
        variants = list(list_variants(best.strategy, place, len(state.target.devices)))
        results += predict_fitting(variants, state, observer)
    return results


def place_for_step(
    steps: Pipeline, state: State, first: int, observer: Observer | None
) -> tuple[list[Candidate], tuple[Timing, ...]]:
    """Return the strategies for a training step that are worth a trial, the best by prediction first.

    Args:
        steps: The default pipeline.
        state: A profiled model.
        first: Position of the pass after `profile`.
        observer: Called before each strategy.

    Raises:
        UsageError: the model is not a training step.
        InfeasibleError: nothing fits; the error is that of whole operators placed.
    """
    began = budget_clock()
    require_training_step(state[Model], state[Profile])
    front, place, _ = cut_specs(steps, first)
    results = predict_steps(state, place, observer)
    fitting = [StepPrediction(item) for item in results if isinstance(item, Prediction)]
    fitting.sort(key=lambda item: item.step_seconds)
    if not fitting:
        raise _find_problem(results)
    note = _describe(fitting, results)
    candidates = [make_candidate(item.prediction, steps, front, state, [note]) for item in _choose_tried(fitting)]
    return candidates, (Timing("strategies", budget_clock() - began),)


def _find_problem(results: Sequence[Prediction | InfeasibleStrategy]) -> InfeasibleError:
    refusals = [item for item in results if isinstance(item, InfeasibleStrategy)]
    return next((item.problem for item in refusals if item.strategy.kind == "placed"), refusals[0].problem)


def _choose_tried(fitting: Sequence[StepPrediction]) -> list[StepPrediction]:
    """Return the best by prediction, close ones of other kinds, and one device."""
    chosen, kinds = [fitting[0]], {fitting[0].prediction.strategy.kind}
    for item in fitting[1:]:
        kind = item.prediction.strategy.kind
        is_close = item.step_seconds <= TRIED_RATIO * fitting[0].step_seconds
        if (
            kind not in kinds
            and (is_close or kind == "one device")
            and len(chosen) < MAX_TRIED + (kind == "one device")
        ):
            chosen.append(item)
            kinds.add(kind)
    return chosen


def _describe(fitting: Sequence[StepPrediction], results: Sequence[Prediction | InfeasibleStrategy]) -> Diagnostic:
    """Return the note that lists what was considered."""
    texts = [f"{item.name}: {format_milliseconds(item.step_seconds)}" for item in fitting[:MAX_LISTED]]
    more = [f"{len(fitting) - MAX_LISTED} more"] if len(fitting) > MAX_LISTED else []
    refused = [item for item in results if isinstance(item, InfeasibleStrategy)]
    refusals = [f"impossible: {refused[0].strategy.name} ({refused[0].problem.message})"] if refused else []
    more_refused = [f"{len(refused) - 1} more impossible"] if len(refused) > 1 else []
    message = f"a training step by prediction: {'; '.join([*texts, *more, *refusals, *more_refused])}"
    return Diagnostic("L068", message, where="step")
