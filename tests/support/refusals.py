"""States in which devices refuse nodes, and checks that a placement respects that."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np

from onnxplace.facts import REFUSED_SECONDS, Placement, Profile, is_refused
from onnxplace.graph.op_graph import Bools
from onnxplace.problem import device_seconds
from onnxplace.state import State


def refuse(state: State, refused: dict[str, Bools]) -> State:
    """Return a state in which classes of devices refuse nodes, of which `refused` has a flag per node by class."""
    profile = state[Profile]
    seconds = {
        name: np.where(refused[name], REFUSED_SECONDS, times) if name in refused else times
        for name, times in profile.seconds.items()
    }
    return state.with_facts(replace(profile, seconds=MappingProxyType(seconds)))


def refuse_at_random(state: State, seed: int) -> State:
    """Return a state in which every class of devices but the first one refuses a third of the nodes."""
    random, (first, *others) = np.random.default_rng(seed), state[Profile].seconds
    assert state.target.devices[0].cost_class == first
    return refuse(state, {name: random.random(len(state[Profile].graph)) < 0.3 for name in others})


def list_misplaced(state: State) -> list[str]:
    """Return the nodes that are on devices which refuse them."""
    device, profile = state[Placement].device, state[Profile]
    seconds = device_seconds(profile, state.target)[device, np.arange(len(device))]
    return [profile.graph.names[node] for node in np.flatnonzero(is_refused(seconds))]
