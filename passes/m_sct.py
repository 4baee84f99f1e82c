"""m-SCT: like m-ETF, except that devices wait for favourite children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.placement.list_scheduling.list_planner import place_by_list_schedule
from onnxplace.passes.placement.list_scheduling.sct_favourites import favourite_children, transfer_edges
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State


@dataclass(frozen=True)
class MSct(Pass):
    """Memory-constrained Small Communication Times.

    Hanen and Munier 1995; Baechi, SoCC 2020, section 3.3. A linear program finds the favourite child of each node: the
    successor that should follow it without a transfer. A device whose last node has a ready favourite child that can
    start nowhere earlier keeps itself for it, unless another node is urgent: it could have started on any device by
    then. Otherwise as m-ETF.

    Two children of a, of which b is its favourite and also reads c, which ends on another device when a does:

        before   a -> b,  c -> b,  a -> x
        m-ETF    a x b | c     x can start at once, b only after the transfer of c's value
        after    a b | c x     a's device waits for b; if x could be elsewhere by then, it would be urgent and go first
    """

    name: ClassVar[str] = "m-sct"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    threshold: Annotated[float, Ge(0), Le(1)] = 0.1
    """An edge is favourite if the program's value for it is at most this; Baechi's default."""
    reserve: Literal["weights", "peak"] = "weights"
    """What a group reserves on its device: its weights, or also the largest output and workspace of a member."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        favourites = favourite_children(problem.seconds.min(axis=0), transfer_edges(problem), self.threshold)
        return place_by_list_schedule(state, problem, favourites, self.name, self.reserve == "peak")
