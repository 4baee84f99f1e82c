"""Bundles for benchmarks: segments of one or a few nodes, run by the runtime itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxplace.bundle import (
    SCHEMA_VERSION,
    Bundle,
    InputRecord,
    Manifest,
    Predicted,
    SegmentRecord,
    Step,
    TargetRecord,
    ValueRecord,
)
from onnxplace.target import Target


@dataclass(frozen=True)
class Probe:
    """A segment to time: its device, nodes, inputs and outputs."""

    device: str
    nodes: str
    """Statements of ONNX's text form, over the names of its inputs and outputs."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str = "float[?]"
    """Type of all inputs and outputs, in ONNX's text form."""
    stage: int = 0
    """Position in a bundle of several probes: after all probes of lower stages."""


def write_probe_bundle(folder: Path, target: Target, probes: Sequence[Probe]) -> Bundle:
    """Write a segment per probe to `folder` and return the bundle that runs them in this order.

    Segments are named by their position. Values pass between devices as in bundles of `split`, and are freed after
    their last reader. Values without a producer are inputs. There are no outputs.
    """
    producers = {name: index for index, probe in enumerate(probes) for name in probe.outputs}
    fed = dict.fromkeys(name for probe in probes for name in probe.inputs if name not in producers)
    segments = tuple(_write_segment(folder, str(index), probe) for index, probe in enumerate(probes))
    kinds = {name: probe.kind.partition("[")[0] for probe in probes for name in (*probe.inputs, *probe.outputs)}
    values = {
        name: ValueRecord(
            dtype=f"tensor({kind})",
            shape=None,
            bytes=0,
            producer=str(producers[name]) if name in producers else None,
            readers=tuple(str(index) for index, probe in enumerate(probes) if name in probe.inputs),
        )
        for name, kind in kinds.items()
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        model="probe",
        model_digest="",
        dimensions={},
        pipeline="",
        placer="",
        versions={},
        target=TargetRecord(devices=target.devices, links=target.links, link_model=target.link_model),
        inputs=tuple(InputRecord(name=name, dtype=values[name].dtype, shape=None) for name in fed),
        outputs=(),
        segments=segments,
        values=values,
        programs=_build_programs(probes, producers),
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

    inputs, outputs = (
        ", ".join(f"{probe.kind} {value}" for value in values) for values in (probe.inputs, probe.outputs)
    )
    text = f'<ir_version: 8, opset_import: ["": 17]> probe ({inputs}) => ({outputs}) {{ {probe.nodes} }}'
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


def _build_programs(probes: Sequence[Probe], producers: Mapping[str, int]) -> dict[str, tuple[Step, ...]]:
    """Return the steps of each device: receive, run, send, free."""
    last_readers = {(name, probe.device): index for index, probe in enumerate(probes) for name in probe.inputs}
    programs: dict[str, list[Step]] = {probe.device: [] for probe in probes}
    received: set[tuple[str, str]] = set()
    for index, probe in enumerate(probes):
        program, device = programs[probe.device], probe.device
        for name in probe.inputs:
            source = probes[producers[name]].device if name in producers else device
            if source != device and (name, device) not in received:
                program.append(Step(op="receive", value=name, peer=source))
                received.add((name, device))
        program.append(Step(op="run", segment=str(index)))
        readers = [(name, reader) for name in probe.outputs for reader in programs if (name, reader) in last_readers]
        program += [Step(op="send", value=name, peer=reader) for name, reader in readers if reader != device]
        unused = [name for name in probe.inputs if last_readers[name, device] == index]
        unused += [name for name in probe.outputs if (name, device) not in last_readers]
        program += [Step(op="free", value=name) for name in unused]
    return {device: tuple(program) for device, program in programs.items()}
