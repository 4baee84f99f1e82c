"""Cut the placed model into segments, and write device programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxplace.errors import Diagnostic
from onnxplace.facts import Placement, Profile, Schedule, Segments, Streaming
from onnxplace.passes.segments.cut_segments import (
    cut_into_segments,
    describe_segments,
    merge_segments,
    report_crossing_states,
    require_states_together,
    write_programs,
)
from onnxplace.passes.segments.memory_limits import cut_within_limits
from onnxplace.passes.segments.streamed_blocks import cut_blocks
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class Split(Pass):
    """Cut each device's sequence where a value must arrive or leave.

    A segment ends after a node that another device reads, since a session returns its results only at its end. A
    segment starts before a node that needs a value which, by the schedule, arrives after the segment would have begun.
    Run in schedule order, such segments cannot deadlock, whatever the placement (docs/decisions/0004-segments.md has
    the proof). Where a device would hold more than its limit while a segment runs, that segment is cut further.
    So is one whose weights come in time for its run and would fill their pool.
    """

    name: ClassVar[str] = "split"
    requires: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule)
    provides: ClassVar[tuple[type, ...]] = (Segments,)

    def run(self, state: State) -> State:
        require_states_together(state)
        profile = state[Profile]
        nodes = cut_blocks(state, merge_segments(state.without(Streaming), cut_into_segments(state)))
        plan = cut_within_limits(state, nodes)
        segments = describe_segments(profile.graph, plan, state.target)
        programs = write_programs(segments, profile.graph, state.target)
        after = state.with_facts(Segments(segments, programs, plan.graph, plan.seconds, plan.simulation))
        if len(segments) > len(nodes):
            after = after.with_notes(_report_further_cuts(len(nodes), len(segments)))
        return after.with_notes(*report_crossing_states(after))


def _report_further_cuts(before: int, after: int) -> Diagnostic:
    message = f"{after} segments instead of {before}, so that devices keep within their memory limits"
    hint = "each cut costs a call and the fusions that it breaks; a larger --max-memory needs fewer cuts"
    return Diagnostic("P012", message, where="split", hint=hint)
