"""Run the programs of a bundle on paper: whatever passes here cannot hang, and finds every value it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnxplace.errors import BundleError

if TYPE_CHECKING:
    from onnxplace.bundle import Manifest, SegmentRecord, Step


def check_programs(manifest: Manifest, where: Path) -> None:
    """Raise BundleError, naming device and step, unless all programs run to their ends and every output is left."""
    try:
        _Paper(manifest).run()
    except ValueError as problem:
        raise BundleError(
            "N008", f"its programs cannot run: {problem}", where=str(where), hint="the bundle is damaged; compile again"
        ) from None


class _Paper:
    """Every device's values by name, what is on its way between them, and how far each program has come."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.segments: dict[str, SegmentRecord] = {segment.id: segment for segment in manifest.segments}
        self.inputs = {item.name for item in manifest.inputs}
        self.devices = {device.id for device in manifest.target.devices}
        self.here = {device: set(self.inputs) for device in self.devices}
        self.under_way: set[tuple[str, str, str]] = set()
        self.ran: set[str] = set()

    def run(self) -> None:
        for device in self.manifest.programs:
            if device not in self.devices:
                raise ValueError(f"there is no device {device!r}")
        self._check_values()
        at = dict.fromkeys(self.manifest.programs, 0)
        moved = True
        while moved:
            moved = False
            for device, program in self.manifest.programs.items():
                while at[device] < len(program) and self._step(device, program[at[device]]):
                    at[device] += 1
                    moved = True
        for device, program in self.manifest.programs.items():
            if at[device] < len(program):
                raise ValueError(f"{device} waits for {program[at[device]].value!r} forever")
        self._check_end()

    def _check_values(self) -> None:
        for name, value in self.manifest.values.items():
            if value.producer is not None and name not in self._outputs_of(value.producer):
                raise ValueError(f"value {name!r} is said to be made by {value.producer!r}, which does not")

    def _outputs_of(self, segment: str) -> tuple[str, ...]:
        return self.segments[segment].outputs if segment in self.segments else ()

    def _step(self, device: str, step: Step) -> bool:
        """Do a step on paper; False if it has to wait; raises ValueError if it cannot be done at all."""
        values = self.here[device]
        if step.op == "run":
            self._run(device, step)
        elif step.op == "receive":
            if (step.value, step.peer, device) not in self.under_way:
                return False
            self.under_way.discard((step.value, step.peer, device))
            values.add(step.value)
        elif step.value not in values:
            raise ValueError(f"{device} is to {step.op} {step.value!r}, which is not there")
        elif step.op == "send":
            if step.peer not in self.devices or step.peer == device:
                raise ValueError(f"{device} is to send {step.value!r} to {step.peer!r}")
            self.under_way.add((step.value, device, step.peer))
        else:
            values.discard(step.value)
        return True

    def _run(self, device: str, step: Step) -> None:
        segment = self.segments.get(step.segment)
        if segment is None or segment.device != device or step.segment in self.ran:
            raise ValueError(f"{device} is to run segment {step.segment!r}, which is not there, not its own, or done")
        for name in segment.inputs:
            if name not in self.here[device]:
                raise ValueError(f"segment {segment.id} on {device} needs {name!r}, which is not there")
        self.ran.add(segment.id)
        self.here[device].update(segment.outputs)

    def _check_end(self) -> None:
        if left := set(self.segments) - self.ran:
            raise ValueError(f"segment {min(left)!r} never runs")
        if self.under_way:
            value, _, device = min(self.under_way)
            raise ValueError(f"{value!r} is sent to {device}, which never takes it")
        made_on = {name: segment.device for segment in self.segments.values() for name in segment.outputs}
        self._check_states(made_on)
        for output in self.manifest.outputs:
            if output.value in self.inputs:
                continue
            if output.value not in made_on or output.value not in self.here[made_on[output.value]]:
                raise ValueError(f"output {output.name!r} returns {output.value!r}, which nobody makes or keeps")

    def _check_states(self, made_on: Mapping[str, str]) -> None:
        """Raise ValueError unless each state is made on its device, and read there alone in the next call."""
        value_of = {output.name: output.value for output in self.manifest.outputs}
        for state in self.manifest.states:
            if state.input not in self.inputs or made_on.get(value_of.get(state.output, "")) != state.device:
                raise ValueError(f"state {state.output!r} = {state.input!r} is not made on {state.device!r}")
            for segment in self.segments.values():
                if state.input in segment.inputs and segment.device != state.device:
                    raise ValueError(f"state {state.input!r} is on {state.device!r}, but {segment.device!r} reads it")
