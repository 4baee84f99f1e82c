"""Find out where a bundle's difference from the unsplit model comes from: a device, a segment, or the model itself.

The segments run one after the other, each alone, so that the values of the first ones can be replaced: by those of the
CPU, or, if it computes wrong ones, too, by those of the unsplit model. Bisection finds how many have to be replaced for
the outputs to be right. Only outputs are compared, so that no tolerance of inner values is needed.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from onnxplace.bundle import WHOLE_MODEL_FILE, Bundle, extract_segment, order_segments
from onnxplace.devices import find_kind
from onnxplace.errors import NoteWarning, OnnxplaceError
from onnxplace.evaluation.compare import (
    TOLERANCE,
    OutputDifference,
    compare_output,
    find_bundle_lineages,
    open_reference,
)
from onnxplace.evaluation.step_inputs import StateCarrier, StepInputs
from onnxplace.machine import available_cores, local_target, without_optimisations
from onnxplace.model import load
from onnxplace.passes.profiling import run_nodes
from onnxplace.pipeline import find_plugin
from onnxplace.runtime import Runtime
from onnxplace.utils import relative_error, report_progress

REPORT = "this is a defect of onnxplace: please report it, with this command and what `onnxplace doctor` prints"
# The first of these types whose tolerance a difference does not exceed is what a device seems to compute in.
_LESS_PRECISE = ("float16", "bfloat16")
_LESS_PRECISE_HINT = "compile with --max-error, which keeps nodes off inexact devices, or place some with --device-map"
_WRONG_HINT = "place nodes elsewhere with --device-map; `onnxplace doctor` shows whether the device computes right"


@dataclass(frozen=True)
class Explanation:
    """Where a difference from the unsplit model comes from, and what to do."""

    cause: Literal["device", "segment", "model", "schedule", "unknown"]
    """`device`: the CPU is right. `segment`: a file is wrong. `model`: the split is right. `schedule`: all is."""
    message: str
    hint: str
    device: str = ""
    """The device whose segments have to run on the CPU instead; empty if it takes several, or none."""
    segment: str = ""
    """The only segment that has to."""


def explain_difference(
    bundle: Bundle,
    against: str | Path | None,
    steps: StepInputs,
    differences: Collection[Collection[OutputDifference]],
    *,
    optimised: bool = True,
) -> Explanation:
    """Return where the difference in the first step that differs comes from.

    Args:
        bundle: The bundle on disk.
        against: The unsplit model's file; None for the bundle's copy.
        steps: The inputs with which it differs.
        differences: By step, of each output; some differ.
        optimised: Whether ONNX Runtime's optimisations are on.
    """
    number, wrong = next(
        (number, wrong)
        for number, step in enumerate(differences)
        if (wrong := [item for item in step if not item.equal])
    )
    try:
        with warnings.catch_warnings(), nullcontext() if optimised else without_optimisations():
            warnings.simplefilter("ignore", NoteWarning)  # that the host computes this size
            feeds, expected = _run_steps(bundle, against, steps, number)
            return _Chain(bundle, feeds, {item.name: expected[item.name] for item in wrong}).explain(against)
    except OnnxplaceError as problem:  # such as a device of another host
        return Explanation("unknown", f"its cause was not found: {problem.message}", REPORT)


def _run_steps(
    bundle: Bundle, against: str | Path | None, steps: StepInputs, number: int
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return inputs, states included, and outputs of a step of the unsplit model, counted from 0."""
    reference = StateCarrier(open_reference(bundle, against, available_cores()), bundle)
    for index in range(number + 1):
        feeds = {**reference.states, **steps.feeds(index)}
        expected = reference(feeds)
        if index == 0:
            steps.learn(reference.states)
    return feeds, expected


class _Chain:
    """The segments of a bundle, to run one after the other on their devices or on the CPU."""

    def __init__(self, bundle: Bundle, feeds: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        self._bundle, self._feeds, self._expected = bundle, feeds, expected
        self._segments, self._lineages = order_segments(bundle.manifest), find_bundle_lineages(bundle)
        self._runtime = cast("type[Runtime]", find_plugin("runtimes", "onnxruntime"))()
        self._hosts = {device.id for device in bundle.target.devices if device.is_host}
        (self._cpu,) = local_target("cpu:0").devices

    def run(self, start: int, stop: int, values: Mapping[str, Any], on_cpu: Collection[str]) -> dict[str, Any]:
        """Return all values after some segments, given those before; segments named in `on_cpu` run on the CPU."""
        values = dict(values)
        for index, segment in enumerate(self._segments[start:stop], start + 1):
            is_moved = segment.id in on_cpu and segment.device not in self._hosts
            part = extract_segment(self._bundle, segment, self._cpu if is_moved else None)
            with self._runtime.open(part) as session:
                values |= session.run({name: values[name] for name in segment.inputs if name in values}).outputs
            report_progress(index, len(self._segments))
        return values

    def is_right(self, values: Mapping[str, Any]) -> bool:
        """Return whether the outputs that differed agree."""
        value_of = {item.name: item.value for item in self._bundle.manifest.outputs}
        return all(
            compare_output(name, values[value_of[name]], expected, self._lineages[name]).equal
            for name, expected in self._expected.items()
        )

    def explain(self, against: str | Path | None) -> Explanation:
        """Return why the outputs differ."""
        everything = {segment.id for segment in self._segments}
        if self.is_right(self.run_all(())):
            message = "each segment alone computes right values on its device: the error arises between them"
            return Explanation("schedule", message, REPORT)
        if self.is_right(on_cpu := self.run_all(everything)):
            return self._explain_device(on_cpu)
        if self.is_right(right := on_cpu | self._run_model()):
            segment = self._segments[self._find_last(right, everything)]
            message = f"segment {segment.id} ({segment.file}) computes other values than the model, on the CPU, too"
            return Explanation("segment", message, REPORT, segment=segment.id)
        if against:
            message = f"the bundle's own copy of the model differs, too, from {against}"
            return Explanation("model", message, "compile that file again; if it differs again, please report this")
        message = "the unsplit model differs from itself where inner values are outputs, too: it amplifies rounding"
        return Explanation("model", message, "try real inputs: --inputs FILE.npz")

    def _explain_device(self, on_cpu: Mapping[str, Any]) -> Explanation:
        """Return which segment, or else which device, has to be replaced by the CPU, where all of them suffice."""
        index = self._find_last(on_cpu, ())
        segment, device = self._segments[index], self._segments[index].device
        if self.is_right(self.run_all({segment.id})):
            subject, place = f"segment {segment.id} on {device} runs on the CPU", (device, segment.id)
        elif self.is_right(self.run_all({item.id for item in self._segments if item.device == device})):
            subject, place = f"all segments on {device} run on the CPU, and no single one explains it", (device, "")
        else:
            subject, place = "all segments run on the CPU, and no single device explains it", ("", "")
        # How far it is off with right inputs: other segments may make more of that.
        values = self.run(index, index + 1, on_cpu, ())
        error = max(relative_error(values[name], on_cpu[name]) for name in segment.outputs)
        kind = next((name for name in _LESS_PRECISE if error <= TOLERANCE[name]), "")
        nature = f"as if it computed float32 in {kind}" if kind else "more than a less precise type explains"
        hint = _LESS_PRECISE_HINT if kind else _WRONG_HINT
        if kind in find_kind(device.partition(":")[0]).options.get("precision", ()):
            hint += f"; {device}{{precision={kind}}} says that it computes in {kind}, and allows for it"
        message = f"the error is gone when {subject}: with right inputs, {segment.id} is off by {error:.2g}, {nature}"
        return Explanation("device", message, hint, *place)

    def run_all(self, on_cpu: Collection[str]) -> dict[str, Any]:
        """Return all values of a request."""
        return self.run(0, len(self._segments), self._feeds, on_cpu)

    def _find_last(self, values: Mapping[str, Any], on_cpu: Collection[str]) -> int:
        """Return the last segment that has to have these values, as those before it have, for right outputs."""
        count = len(self._segments)

        def suffices(index: int) -> bool:
            return self.is_right(self.run(index + 1, count, values, on_cpu))

        return bisect_left(range(count - 1), True, key=suffices)

    def _run_model(self) -> dict[str, Any]:
        """Return the values of the unsplit model that segments compute, as far as it has them."""
        model = load(self._bundle.file(WHOLE_MODEL_FILE))
        computed = {name for node in model.nodes for name in node.output}
        names = [name for name in self._bundle.manifest.values if name in computed]
        return run_nodes(model, range(len(model.nodes)), names, self._feeds, self._cpu.address, None)
