"""Checks of placers that learn."""

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Groups, Placement, Schedule
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace.state import Pass, State
from onnxplace_training.array_files import HASH_KEY

PUBLISHED = ("m-topo", "m-etf", "single")


def check_fits_wherever_a_published_placer_does(placer: Pass, state: State) -> None:
    """Check that a placer refuses only what published placers refuse, and keeps limits, pins and groups."""
    try:
        after = run_pass(placer, state)
    except InfeasibleError:
        assert [name for name in PUBLISHED if _fits(name, state)] == []
        return
    device, groups = after[Placement].device, state[Groups].group
    peaks = after[Schedule].simulation.peak_bytes
    assert all(peak <= item.memory_bytes for peak, item in zip(peaks, state.target.devices))
    pins = state[Groups].pinned[groups]
    assert (device[pins >= 0] == pins[pins >= 0]).all()
    assert all(len(set(device[groups == group].tolist())) == 1 for group in set(groups.tolist()))


def without_hash(data: bytes) -> bytes:
    """Return a file of arrays whose hash has another name, so that changes reach the checks after that of the hash."""
    return data.replace(HASH_KEY.encode(), b"x" * len(HASH_KEY))


def _fits(name: str, state: State) -> bool:
    try:
        run_pass(make_pass(name), state)
    except InfeasibleError:
        return False
    return True
