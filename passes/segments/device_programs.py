"""Each device's program: receive, run, send and free.

Its order follows the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import Instruction, Segment
from onnxplace.graph import OpGraph

Program = tuple[Instruction, ...]


@dataclass(frozen=True)
class _ValueUses:
    """Where the values between segments come from and go to."""

    producer: dict[str, int]
    """The segment that makes each value; values without one are inputs of the model."""
    sends: dict[int, list[tuple[str, int]]]
    """Per segment, its values and the devices that they are sent to, in booking order."""
    last_reader: dict[tuple[str, int], int]
    """By value and device, the last segment that reads the value there."""


def write_programs(segments: Sequence[Segment], graph: OpGraph, devices: int) -> tuple[Program, ...]:
    """Return the program of each device; linear."""
    uses = _collect_uses(segments)
    returned = {graph.value_names[value] for value in np.flatnonzero(graph.is_output)}
    programs: list[list[Instruction]] = [[] for _ in range(devices)]
    received: set[tuple[str, int]] = set()
    for index, segment in enumerate(segments):
        program, home = programs[segment.device], segment.device
        for name in segment.inputs:
            if (name, home) not in received and _is_remote(name, home, segments, uses):
                program.append(Instruction("receive", value=name, peer=segments[uses.producer[name]].device))
                received.add((name, home))
        program.append(Instruction("run", segment=index))
        program.extend(Instruction("send", value=name, peer=peer) for name, peer in uses.sends.get(index, ()))
        unread = [name for name in segment.outputs if (name, home) not in uses.last_reader]
        last_read = [name for name in segment.inputs if uses.last_reader[name, home] == index]
        for name in (*last_read, *unread):
            # An output of the model stays on the device that made it; copies of it elsewhere may go.
            if name not in returned or _is_remote(name, home, segments, uses):
                program.append(Instruction("free", value=name))
    return tuple(tuple(program) for program in programs)


def _collect_uses(segments: Sequence[Segment]) -> _ValueUses:
    producer = {name: index for index, segment in enumerate(segments) for name in segment.outputs}
    uses = _ValueUses(producer, {}, {})
    for index, segment in enumerate(segments):
        for name in segment.inputs:
            first_reader = (name, segment.device) not in uses.last_reader
            if first_reader and _is_remote(name, segment.device, segments, uses):
                uses.sends.setdefault(producer[name], []).append((name, segment.device))
            uses.last_reader[name, segment.device] = index
    return uses


def _is_remote(name: str, device: int, segments: Sequence[Segment], uses: _ValueUses) -> bool:
    """Return whether a segment on another device makes a value."""
    return name in uses.producer and segments[uses.producer[name]].device != device
