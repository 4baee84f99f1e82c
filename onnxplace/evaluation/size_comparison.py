"""Compare a bundle with the unsplit model at other sizes of symbolic dimensions than the compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onnxplace.bundle import Bundle
from onnxplace.errors import ExecutionError, FeedError, ModelError, format_names
from onnxplace.evaluation.compare import OutputDifference
from onnxplace.evaluation.step_inputs import StepInputs, choose_step_inputs
from onnxplace.feeds import symbols_of_dimension

StepDifferences = Sequence[Sequence[OutputDifference]]
"""The differences of all outputs, by step."""


@dataclass(frozen=True)
class SizeComparison:
    """A comparison of a bundle with the unsplit model at one choice of sizes."""

    sizes: Mapping[str, int]
    """Of symbolic dimensions, by name."""
    steps: StepDifferences = ()
    """None if the bundle or the model refuses these sizes."""
    refused_by: Literal["", "bundle", "model"] = ""
    message: str = ""
    """The error of the one that refuses them."""

    @property
    def result(self) -> Literal["equal", "differs", "refused", "skipped"]:
        """Return the verdict: sizes that the model itself refuses are skipped."""
        if self.refused_by:
            return "skipped" if self.refused_by == "model" else "refused"
        return "equal" if all(item.equal for step in self.steps for item in step) else "differs"

    @property
    def text(self) -> str:
        """Return the sizes as `--shape` takes them; of many, the first ones."""
        return format_names((f"{name}={size}" for name, size in self.sizes.items()), quoted=False)


def compare_other_sizes(
    compare: Callable[[StepInputs], StepDifferences],
    bundle: Bundle,
    steps: StepInputs,
    count: int,
    *,
    fixed: Iterable[str] = (),
) -> Iterator[SizeComparison]:
    """Yield comparisons until the model has taken `count` other sizes of each dimension, or no more are left to try.

    Args:
        compare: Compares with the unsplit model, which runs first, on such inputs.
        bundle: Has the dimensions.
        steps: Inputs of the sizes from which the others differ.
        count: Number of other sizes of each dimension.
        fixed: Dimensions that keep their sizes.
    """
    kept = {symbol for name in fixed for symbol in (name, *symbols_of_dimension(name))}
    missing = {name: count for name in steps.sizes if name not in kept}
    for sizes in list_other_sizes(steps.sizes, list(missing)):
        changed = [name for name in missing if sizes[name] != steps.sizes[name]]
        if all(missing[name] <= 0 for name in changed):
            continue
        comparison = _compare(compare, bundle, sizes, steps.seed)
        yield comparison
        for name in changed if comparison.refused_by != "model" else ():
            missing[name] -= 1


def list_other_sizes(sizes: Mapping[str, int], names: Sequence[str]) -> list[dict[str, int]]:
    """Return other sizes to try of the dimensions `names`.

    First those in which all dimensions change, each to a size of its own; then all in the same way, as sizes without a
    common name may have to be equal; then one dimension at a time.

    >>> list_other_sizes({"batch": 4}, ["batch"])[:3]
    [{'batch': 5}, {'batch': 1}, {'batch': 3}]
    """
    options = {
        name: [size for size in dict.fromkeys((own + 1, 1, 3, 2 * own, own // 2, 7)) if size not in (0, own)]
        for name, own in sizes.items()
        if name in names
    }
    turns = range(max(map(len, options.values()), default=0))
    choices = [
        *({name: turn + place for place, name in enumerate(options)} for turn in turns),
        *(dict.fromkeys(options, turn) for turn in turns),
        *({name: turn} for turn in turns for name in options),
    ]
    others = [
        {**sizes, **{name: options[name][index % len(options[name])] for name, index in choice.items()}}
        for choice in choices
    ]
    return list({tuple(other.values()): other for other in others}.values())


def _compare(
    compare: Callable[[StepInputs], StepDifferences], bundle: Bundle, sizes: Mapping[str, int], seed: int
) -> SizeComparison:
    try:
        steps = choose_step_inputs(bundle, None, sizes, seed)
    except FeedError as problem:  # an expression has no such value, or the inputs do not fit into memory
        return SizeComparison(sizes, refused_by="model", message=problem.message)
    try:
        return SizeComparison(sizes, compare(steps))
    except ModelError as problem:
        return SizeComparison(sizes, refused_by="model", message=problem.message)
    except (ExecutionError, FeedError) as problem:
        return SizeComparison(sizes, refused_by="bundle", message=problem.message)
