"""The profile of a model with clones: they take the time of their originals."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxplace.facts import Profile, Source
from onnxplace.graph import Floats, Ints
from onnxplace.model import build_op_graph
from onnxplace.passes.recomputation.cloned_model import ClonedModel

# A node of a gate: it computes a few numbers, or returns a view.
GATE_SECONDS = 2e-6


def clone_profile(profile: Profile, cloned: ClonedModel) -> Profile:
    """Return the profile of a model with clones."""
    source, is_gate = cloned.source, cloned.source < 0
    graph = build_op_graph(cloned.model, cloned.value_bytes)
    workspace = np.where(is_gate, 0, profile.graph.workspace_bytes[source]).astype(np.int64)
    seconds: dict[str, Floats] = {}
    sources: dict[str, NDArray[np.uint8]] = {}
    for name, times in profile.seconds.items():
        seconds[name] = np.where(is_gate, GATE_SECONDS, times[source])
        sources[name] = np.where(is_gate, _gate_source(profile.sources[name]), profile.sources[name][source])
    return Profile(
        graph=replace(graph, workspace_bytes=workspace),
        seconds=MappingProxyType(seconds),
        sources=MappingProxyType(sources),
        unit=_number_units(profile.unit, cloned),
        user_groups=None
        if profile.user_groups is None
        else np.where(is_gate | cloned.is_clone, -1, profile.user_groups[source]),
        backward=None if profile.backward is None else (is_gate | cloned.is_clone | profile.backward[source]),
        training=None if profile.training is None else profile.training.spread(source, is_gate | cloned.is_clone),
        unsharded_seconds=profile.unsharded_seconds,
    )


def _gate_source(sources: NDArray[np.uint8]) -> np.uint8:
    """Return the origin of a gate's time: as sure as the rest of the class."""
    is_measured = bool(np.isin(sources, (Source.MEASURED, Source.KNOWN)).all())
    return np.uint8(Source.MEASURED if is_measured else Source.ESTIMATED)


def _number_units(unit: Ints, cloned: ClonedModel) -> Ints:
    """Return the kernel of each node: clones of the nodes of one kernel are one kernel if they are neighbours."""
    numbers: dict[tuple[int, bool, int], int] = {}
    result = np.empty(len(cloned.source), dtype=np.int32)
    last = (-1, False, -1)
    for index, (source, is_clone) in enumerate(zip(cloned.source.tolist(), cloned.is_clone.tolist())):
        kernel = int(unit[source]) if source >= 0 else -1 - index
        if is_clone:
            run = last[2] if last[:2] == (kernel, True) else index
            last = (kernel, True, run)
            result[index] = numbers.setdefault(last, len(numbers))
        else:
            last = (kernel, False, -1)
            result[index] = numbers.setdefault(last, len(numbers))
    return result
