"""The profile of a sharded model, scaled from that of the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxplace.facts import Profile, Source
from onnxplace.graph import Floats, Ints, Longs
from onnxplace.model import build_op_graph, value_bytes
from onnxplace.passes.sharding.choice import Choice
from onnxplace.passes.sharding.rewrite import ShardedModel
from onnxplace.passes.sharding.shape_folding import infer_all_shapes
from onnxplace.passes.sharding.work_costs import WorkCosts
from onnxplace.target import Target


def scale_profile(profile: Profile, sharded: ShardedModel, choice: Choice, work: WorkCosts, target: Target) -> Profile:
    """Return the profile of a sharded model.

    Parts of a node take their share of its time. Exchanges take what their bytes take to copy.
    """
    origins = sharded.origins
    source = np.array([origin.source for origin in origins], dtype=np.int64)
    is_part = source >= 0
    fraction = _fractions(sharded, choice, work)
    moved = np.array([origin.moved_bytes for origin in origins], dtype=np.float64)
    graph = build_op_graph(sharded.model, value_bytes(sharded.model, infer_all_shapes(sharded.model)))
    peaks = work.peaks[0]
    copy_seconds = moved / peaks.bytes_per_second + np.where(moved > 0, peaks.kernel_seconds, 0.0)
    seconds: dict[str, Floats] = {}
    sources: dict[str, NDArray[np.uint8]] = {}
    for name, times in profile.seconds.items():
        seconds[name] = np.where(is_part, times[source] * fraction, copy_seconds)
        sources[name] = _scale_sources(profile.sources[name], source)
    workspace = np.where(is_part, profile.graph.workspace_bytes[source] * fraction, 0).astype(np.int64)
    return Profile(
        graph=replace(graph, workspace_bytes=workspace),
        seconds=MappingProxyType(seconds),
        sources=MappingProxyType(sources),
        unit=_units(profile.unit, source, sharded),
        backward=None if profile.backward is None else np.where(is_part, profile.backward[source], False),
        unsharded_seconds=MappingProxyType(_whole_seconds(profile, target)),
    )


def _whole_seconds(profile: Profile, target: Target) -> Mapping[str, float]:
    return {device.cost_class: float(profile.seconds[device.cost_class].sum()) for device in target.devices}


def _fractions(sharded: ShardedModel, choice: Choice, work: WorkCosts) -> Floats:
    """Return, per node, which fraction of its original's time it takes; 0 for exchanges."""
    cache: dict[tuple[int, int, int], float] = {}
    result = np.zeros(len(sharded.origins))
    for index, origin in enumerate(sharded.origins):
        if origin.source < 0:
            continue
        strategy = choice.strategies[origin.source]
        key = work.space.kinds[origin.source], id(strategy), origin.device
        if key not in cache:
            cache[key] = work.fraction(origin.source, strategy, origin.device)
        result[index] = cache[key]
    return result


def _scale_sources(sources: NDArray[np.uint8], source: Longs) -> NDArray[np.uint8]:
    """Return the origin of each node's time: exchanges are as sure as the rest of the class."""
    is_measured = bool(np.isin(sources, (Source.MEASURED, Source.KNOWN)).all())
    exchange = np.uint8(Source.MEASURED if is_measured else Source.ESTIMATED)
    return np.where(source >= 0, sources[source], exchange).astype(np.uint8)


def _units(unit: Ints, source: Longs, sharded: ShardedModel) -> Ints:
    """Return the kernel of each node: parts of one kernel on one device stay together."""
    numbers: dict[tuple[int, int], int] = {}
    result = np.empty(len(source), dtype=np.int32)
    for index, (original, origin) in enumerate(zip(source.tolist(), sharded.origins)):
        key = (int(unit[original]), origin.device) if original >= 0 else (-1 - index, 0)
        result[index] = numbers.setdefault(key, len(numbers))
    return result
