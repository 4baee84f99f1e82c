"""Find out where a bundle's difference from the unsplit model comes from: a device, a segment, or the model itself.

The segments run one after the other, each in its own session, some of them on the CPU instead of their devices.
Bisection finds how many have to for the outputs to be right. Only outputs are compared, so that this needs no tolerance
of inner values. ONNX Runtime's optimisations are off: then segments of CPUs round as the model does.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.bundle.bundle_simulation import order_segments
from onnxplace.bundle.manifest import SegmentRecord
from onnxplace.errors import NoteWarning, OnnxplaceError
from onnxplace.machine.hardware import available_cores, probe_device
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, without_optimisations
from onnxplace.machine.ort_values import make_runner
from onnxplace.measure.compare import TOLERANCE, Differences, ModelComparison
from onnxplace.measure.step_inputs import StateCarrier, StepInputs
from onnxplace.model.loading import load
from onnxplace.passes.profiling.node_errors import run_nodes
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.utils.differences import relative_error

CPU = DeviceAddress("cpu", 0)
_REPORT = "this looks like a defect of onnxplace: please report it, with this command and `onnxplace doctor`'s report"
_PLACE = "place nodes elsewhere with --device-map, or bound errors with --max-error; `onnxplace doctor` checks devices"


@dataclass(frozen=True)
class Explanation:
    """Where a difference from the unsplit model comes from, and what to do."""

    cause: Literal["device", "split", "model", "unknown"]
    """`device`: the CPU computes it right. `split`: a segment's file is wrong. `model`: none is."""
    message: str
    hint: str
    device: str = ""
    """The device whose segments have to run on the CPU instead; empty if it takes several, or none."""
    segment: str = ""
    """The only segment that has to, or the first one that does not compute what the model does."""


def find_cause(bundle: Bundle, against: str | Path | None, steps: StepInputs, differences: Differences) -> Explanation:
    """Return where the difference in the first step that differs comes from.

    Args:
        bundle: The bundle on disk.
        against: The unsplit model's file; None for the bundle's copy.
        steps: The inputs with which it differs.
        differences: By step, of each output; some differ.
    """
    wrong = [[item.name for item in step if not item.equal] for step in differences]
    count = next(number for number, names in enumerate(wrong, 1) if names)
    try:
        with warnings.catch_warnings(action="ignore", category=NoteWarning), without_optimisations():
            comparison = ModelComparison(bundle, against, available_cores(), wrong[count - 1])
            return _Chain(bundle, comparison, steps, count).explain(against)
    except OnnxplaceError as problem:  # such as a device of another host
        return Explanation("unknown", f"its cause was not found: {problem.message}", problem.hint or _REPORT)


class _Chain:
    """The segments of a bundle, one after the other, on their devices or on the CPU."""

    def __init__(self, bundle: Bundle, comparison: ModelComparison, steps: StepInputs, count: int) -> None:
        self._bundle, self._comparison, self._steps, self._count = bundle, comparison, steps, count
        self._segments = order_segments(bundle.manifest)
        self._names = [segment.id for segment in self._segments]

    def explain(self, against: str | Path | None) -> Explanation:
        """Return why the outputs differ."""
        if self._try(())[0]:
            return Explanation("unknown", "the error is gone when segments run alone, without optimisations", _REPORT)
        is_right, on_cpu = self._try(self._names)
        if is_right:
            return self._explain_device(on_cpu)
        if segment := self._find_wrong(on_cpu):
            message = f"segment {segment.id} ({segment.file}) computes other values than the model, on the CPU, too"
            return Explanation("split", message, _REPORT, segment=segment.id)
        message = f"the split is right: the bundle's own copy of the model differs from {against or 'itself'}, too"
        return Explanation("model", message, "compile the model again; if it differs again, please report this")

    def _explain_device(self, on_cpu: Mapping[str, Any]) -> Explanation:
        """Return which segment, or else which device, has to be replaced by the CPU, where all of them suffice."""
        last = bisect_left(range(1, len(self._names)), True, key=lambda count: self._try(self._names[:count])[0])
        segment, device = self._segments[last], self._segments[last].device
        if self._try({segment.id})[0]:
            subject, place = f"segment {segment.id} on {device} runs on the CPU", (device, segment.id)
        elif self._try({item.id for item in self._segments if item.device == device})[0]:
            subject, place = f"all segments on {device} run on the CPU, and no single one explains it", (device, "")
        else:
            subject, place = "all segments run on the CPU, and no single device explains it", ("", "")
        # How far it is off with right inputs: other segments may make more of that.
        outputs = self._run(segment, on_cpu, is_moved=False)
        error = max(relative_error(value, on_cpu[name]) for name, value in outputs.items())
        nature = "float32 is less precise there" if error <= TOLERANCE["bfloat16"] else "values are wrong there"
        message = f"the error is gone when {subject}: {nature} ({segment.id} alone is off by {error:.2g})"
        traits = probe_device(self._bundle.target.devices[self._bundle.target.position(device)])
        if traits and (lines := traits.describe()):
            message += f"; there, {', '.join(lines)}"
        return Explanation("device", message, _PLACE, *place)

    def _try(self, moved: Collection[str]) -> tuple[bool, dict[str, Any]]:
        """Return whether outputs agree if some segments, by id, run on the CPU, and all values of the last step."""
        values: dict[str, Any] = {}

        def run(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
            values.update({**self._bundle.streamed_weights(), **feeds})
            for segment in self._segments:
                values.update(self._run(segment, values, is_moved=segment.id in moved))
            return {item.name: values.get(item.value) for item in self._bundle.manifest.outputs}

        steps = self._comparison.compare_steps(StateCarrier(run, self._bundle), self._steps, self._count)
        return all(item.equal for step in steps for item in step), values

    def _run(self, segment: SegmentRecord, values: Mapping[str, Any], *, is_moved: bool) -> dict[str, Any]:
        """Return the outputs of a segment, by its model for these sizes if its device needs static shapes."""
        device = self._bundle.target.devices[self._bundle.target.position(segment.device)]
        fits = segment.static and all(values[name].shape == size for name, size in segment.static.shapes.items())
        is_moved = is_moved or (device.needs_static_shapes and not fits)  # the host computes other sizes
        static = segment.static if fits and not is_moved else None
        file = self._bundle.file((static or segment).file)
        options = make_session_options(available_cores(), entries=self._bundle.session_entries)
        session = open_session(file, options, CPU if is_moved else device.address, segment.id)
        feeds = {item.name: values[item.name] for item in session.get_inputs() if item.name in values}
        return dict(zip([item.name for item in session.get_outputs()], make_runner(session, segment.id)(feeds)))

    def _find_wrong(self, on_cpu: Mapping[str, Any]) -> SegmentRecord | None:
        """Return the first segment with a value that differs from the unsplit model's, among those that both have."""
        model = load(self._bundle.file(WHOLE_MODEL_FILE))
        names = sorted({name for node in model.nodes for name in node.output} & on_cpu.keys())
        values = run_nodes(model, range(len(model.nodes)), names, on_cpu, CPU, "none")
        wrong = {name for name in names if relative_error(on_cpu[name], values[name]) > TOLERANCE["float32"]}
        return next((item for item in self._segments if wrong.intersection(item.outputs)), None)
