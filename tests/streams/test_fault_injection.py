"""A fault at every instruction of devices with streams: the checks of CPUs, with work that is enqueued and late."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.fake_streams import FakeDriver, use_fake_driver
from tests.support.fault_injection import KINDS, Fault, inject, inject_at_each_place, list_faults
from tests.support.small_programs import make_ping_pong, make_random_model

# An exception set in a thread from outside may come while Python frees an object, and is printed then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PLACES = [("fake:0", "fake:1"), ("fake:0", "cpu:0"), ("cpu:0", "fake:0"), ("fake:0/0", "fake:0/1", "cpu:0")]


class Programs(dict):
    """Bundles and models by the names of devices; what hypothesis prints of them is short."""

    def __repr__(self):
        return "Programs()"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Models with states and values to and fro, and their bundles, by the names of the devices."""
    models = {names: make_ping_pong(len(names)) for names in PLACES}
    return Programs(
        (names, (model.compile(tmp_path_factory.mktemp("small"), names), model)) for names, model in models.items()
    )


# Each kind in one of the four places; random faults are of all of them in other places.
@pytest.mark.parametrize(
    ("names", "kind"),
    [(PLACES[turn % len(PLACES)], kind) for turn, kind in enumerate(KINDS)],
    ids=lambda item: item if isinstance(item, str) else ",".join(item),
)
@pytest.mark.sampled(6)
def test_a_fault_at_any_instruction_is_survived(programs, names, kind):
    bundle, model = programs[names]
    assert inject_at_each_place(bundle, model, kind) > 0


@settings(max_examples=15)
@given(st.integers(0, 1 << 30))
def test_random_faults_in_random_programs_are_survived(tmp_path_factory, seed):
    draw, model = random.Random(seed), make_random_model(seed)
    bundle = model.compile(tmp_path_factory.mktemp("random"), draw.sample(["fake:0", "fake:1", "fake:0/1", "cpu:0"], 3))
    with use_fake_driver(FakeDriver(seed, draw.random() < 0.5, draw.random())):
        for fault in draw.sample(list_faults(bundle), 3):
            inject(bundle, model, fault)


@settings(max_examples=20)
@given(st.sampled_from(PLACES), st.integers(0, 2), st.floats(0, 1e-3), st.sampled_from(["", " deliveries"]))
def test_a_thread_that_is_killed_at_any_moment_leaves_no_caller_waiting(programs, names, device, delay, part):
    bundle, model = programs[names]
    name = names[device % len(names)]
    inject(bundle, model, Fault("kill_outside", name, -1, False, "submit", delay, "" if "cpu" in name else part))
