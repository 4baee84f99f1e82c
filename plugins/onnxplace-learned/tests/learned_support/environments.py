"""Random environments for episodes."""

from hypothesis import strategies as st

from onnxplace.facts import Groups, Profile
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.policies.environment import Environment

STARTS = ("several", "m-etf", "first-device")


@st.composite
def environments(draw, min_nodes=1):
    facts = draw(st.sampled_from([(Profile,), (Profile, Groups)]))
    state = random_state(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(min_nodes, 30)),
        draw(st.integers(1, 4)),
        facts=facts,
        tight=draw(st.booleans()),
        pinned=draw(st.booleans()),
        shuffled=draw(st.booleans()),
    )
    return Environment(
        placement_problem(state),
        draw(st.sampled_from(["topological", "reversed", "bfs"])),
        start_from=draw(st.sampled_from(STARTS)),
    )
