"""Bundles that are made to be timed: segments of one or a few nodes, run by the runtime itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxplace.bundle import SCHEMA_VERSION, Bundle, InputRecord, Manifest, Predicted, SegmentRecord, Step, TargetRecord
from onnxplace.target import Target


@dataclass(frozen=True)
class Probe:
    """A segment: what it computes, where, from which values to which."""

    device: str
    nodes: str
    """Statements of ONNX's text form, over the names of its inputs and outputs."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str = "uint8[?]"
    """Type of all inputs and outputs, as ONNX's text form has it."""
    stage: int = 0
    """Where several make a bundle: after all those of lower stages."""


def write_probe_bundle(folder: Path, target: Target, probes: Sequence[Probe]) -> Bundle:
    """Write a segment per probe to `folder` and return the bundle that runs them in this order.

    Segments are named by their position. Values pass between devices as `split` has them, and are freed as soon as
    nobody reads them any more. What no probe makes is an input. There are no outputs.
    """
    made = {name: index for index, probe in enumerate(probes) for name in probe.outputs}
    fed = dict.fromkeys(name for probe in probes for name in probe.inputs if name not in made)
    segments = tuple(_write_segment(folder, str(index), probe) for index, probe in enumerate(probes))
    kinds = {name: probe.kind for probe in probes for name in probe.inputs}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        model="probe",
        model_digest="",
        dimensions={},
        pipeline="",
        placer="",
        versions={},
        target=TargetRecord(devices=target.devices, links=target.links, link_model=target.link_model),
        inputs=tuple(
            InputRecord(name=name, dtype=f"tensor({kinds[name].partition('[')[0]})", shape=None) for name in fed
        ),
        outputs=(),
        segments=segments,
        values={},
        programs=_build_programs(probes, made),
        predicted=Predicted(step_seconds=0, single_device_seconds=0, lower_bound_seconds=0, interval_seconds=0),
        devices=(),
        transfers=0,
        transfer_bytes=0,
        diagnostics=(),
        files={},
    )
    return Bundle(folder, manifest)


def _write_segment(folder: Path, name: str, probe: Probe) -> SegmentRecord:
    from onnx import parser

    ends = [", ".join(f"{probe.kind} {value}" for value in values) for values in (probe.inputs, probe.outputs)]
    text = f'<ir_version: 8, opset_import: ["": 17]> probe ({ends[0]}) => ({ends[1]}) {{ {probe.nodes} }}'
    (folder / f"{name}.onnx").write_bytes(parser.parse_model(text).SerializeToString())
    return SegmentRecord(
        id=name,
        file=f"{name}.onnx",
        device=probe.device,
        nodes=0,
        inputs=probe.inputs,
        outputs=probe.outputs,
        seconds=0,
        weights_bytes=0,
        workspace_bytes=0,
    )


def _build_programs(probes: Sequence[Probe], made: Mapping[str, int]) -> dict[str, tuple[Step, ...]]:
    """Return the steps of each device: receive, run, send, free."""
    last = {(name, probe.device): index for index, probe in enumerate(probes) for name in probe.inputs}
    programs: dict[str, list[Step]] = {probe.device: [] for probe in probes}
    here: set[tuple[str, str]] = set()
    for index, probe in enumerate(probes):
        program, home = programs[probe.device], probe.device
        for name in probe.inputs:
            if name in made and probes[made[name]].device != home and (name, home) not in here:
                program.append(Step(op="receive", value=name, peer=probes[made[name]].device))
                here.add((name, home))
        program.append(Step(op="run", segment=str(index)))
        readers = [(name, device) for name in probe.outputs for device in programs if (name, device) in last]
        program += [Step(op="send", value=name, peer=device) for name, device in readers if device != home]
        over = [name for name in probe.inputs if last[name, home] == index]
        over += [name for name in probe.outputs if (name, home) not in last]
        program += [Step(op="free", value=name) for name in over]
    return {device: tuple(program) for device, program in programs.items()}
