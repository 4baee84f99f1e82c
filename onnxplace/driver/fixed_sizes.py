"""Whether it would help to fix the sizes of a model's inputs: then axes of these sizes can be split over devices."""

from __future__ import annotations

import numpy as np

from onnxplace.driver.decision import BuiltStrategy, Strategy, parse_passes, predict
from onnxplace.driver.latency import MAX_STEP_RATIO
from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Profile, Shards
from onnxplace.model import Model, read_shape_entries
from onnxplace.passes.profiling import device_peaks
from onnxplace.problem import device_seconds
from onnxplace.utils import format_milliseconds

# Beyond, the choice of layouts takes long for a hint.
MAX_NODES = 5_000


def suggest_fixed_sizes(kept: BuiltStrategy) -> list[Diagnostic]:
    """Return a note if operators could be split with a clear gain, were the sizes of inputs fixed.

    The layouts are only chosen where the bound of what splitting can gain is clear, too.
    """
    profiled, model = kept.profiled, kept.profiled.state[Model]
    limit = MAX_STEP_RATIO * kept.step_seconds
    entries = [size for value in model.inputs for size in read_shape_entries(value.type) or ()]
    is_open = any(not isinstance(size, int) for size in entries) and not model.other_sizes
    profile = profiled.state[Profile]
    if not is_open or profile.training or len(profile.graph) > MAX_NODES or _bound_split_seconds(kept) >= limit:
        return []
    try:
        passes = (*parse_passes("shard{fixed=true}"), *profiled.replace_placer("auto{seconds=0.5}"))
        split = predict(Strategy("fixed sizes", "sharded", passes), profiled)
    except InfeasibleError:  # nothing to split, or a state that grows from call to call
        return []
    if split.step_seconds >= limit:
        return []
    sizes = ", ".join(f"{name}={size}" for name, size in model.dimensions.items())
    message = (
        f"with --fixed-sizes, {' or '.join(model.dimensions)} can be split, {split.state[Shards].ways} ways: "
        f"{format_milliseconds(split.step_seconds)} instead of {format_milliseconds(kept.step_seconds)}, "
        f"{kept.step_seconds / split.step_seconds:.2f} times as fast"
    )
    return [Diagnostic("P069", message, where=model.name, hint=f"the bundle then takes {sizes} alone")]


def _bound_split_seconds(kept: BuiltStrategy) -> float:
    """Return what a step takes at least if all nodes are split over all devices: launches stay as long as they are."""
    state = kept.profiled.state
    seconds = device_seconds(state[Profile], state.target).min(axis=0)
    launches = np.minimum(seconds, min(device_peaks(device).kernel_seconds for device in state.target.devices))
    return float(launches.sum() + (seconds - launches).sum() / len(state.target.devices))
