"""The profile of a sharded model, scaled from that of the original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from onnxplace.facts import Profile
from onnxplace.graph import Floats, Ints, Longs
from onnxplace.model import build_op_graph, value_bytes
from onnxplace.passes.placement.grouping import Union, first_equal
from onnxplace.passes.sharding.apply.sharded_model import ShardedModel
from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.space.known_shapes import infer_all_shapes
from onnxplace.passes.sharding.space.sharding_costs import WorkCosts
from onnxplace.problem import device_seconds
from onnxplace.target import Target


def scale_profile(
    profile: Profile, sharded: ShardedModel, choice: LayoutChoice, work: WorkCosts, target: Target, group: Sequence[int]
) -> Profile:
    """Return the profile of a sharded model.

    Parts of a node take their share of its time. Exchanges take what their bytes take to copy.
    """
    seconds_of_group = device_seconds(profile, target)[list(group)]
    origins = sharded.origins
    source = np.array([origin.source for origin in origins], dtype=np.int64)
    fraction = _fractions(sharded, choice, work, seconds_of_group)
    moved = np.array([origin.moved_bytes for origin in origins], dtype=np.float64)
    graph = build_op_graph(sharded.model, value_bytes(sharded.model, infer_all_shapes(sharded.model)))
    peaks = work.peaks[0]
    copy_seconds = moved / peaks.bytes_per_second + np.where(moved > 0, peaks.kernel_seconds, 0.0)
    return replace(
        profile.rewritten(graph, source, _units(profile.unit, source, sharded), copy_seconds, fraction),
        training=None if profile.training is None else profile.training.spread(source),
        unsharded_seconds=MappingProxyType(
            {device.cost_class: float(profile.seconds[device.cost_class].sum()) for device in target.devices}
        ),
    )


def _fractions(sharded: ShardedModel, choice: LayoutChoice, work: WorkCosts, device_seconds: Floats) -> Floats:
    """Return, per node, which fraction of its original's time it takes on its device; 0 for exchanges."""
    cache: dict[tuple[int, int, int, float], float] = {}
    result = np.zeros(len(sharded.origins))
    for index, origin in enumerate(sharded.origins):
        if origin.source < 0:
            continue
        strategy, whole = choice.strategies[origin.source], float(device_seconds[origin.device, origin.source])
        key = work.space.kinds[origin.source], id(strategy), origin.device, whole
        if key not in cache:
            part = work.part_seconds(origin.source, strategy, origin.device, whole)
            cache[key] = part / whole if whole > 0 else 1.0
        result[index] = cache[key]
    return result


def _units(unit: Ints, source: Longs, sharded: ShardedModel) -> Ints:
    """Return the kernel of each node: parts of one kernel on one device stay together.

    So do the steps of an exchange with the nodes next to them: the slice that a device keeps with the sum or
    concatenation it goes into, and the slice that it sends with the node that makes the value. Apart, they would be
    segments of their own around a wait.
    """
    numbers: dict[tuple[int, int], int] = {}
    result = np.empty(len(source), dtype=np.int32)
    for index, original in enumerate(source.tolist()):
        key = (int(unit[original]), sharded.origins[index].device) if original >= 0 else (-1 - index, 0)
        result[index] = numbers.setdefault(key, len(numbers))
    joined = Union(np.full(len(source), -1, dtype=np.int32))
    joined.join(first_equal(result), np.arange(len(source)), "one kernel")
    steps = _find_partners(sharded)
    joined.join(np.array([step for step, _ in steps], np.int32), np.array([mate for _, mate in steps], np.int32), "")
    return joined.groups().group


def _find_partners(sharded: ShardedModel) -> list[tuple[int, int]]:
    """Return the steps of exchanges that stay with a node: that node's index is second."""
    nodes, origins = sharded.model.nodes, sharded.origins
    readers: dict[str, list[int]] = {}
    producer = {name: index for index, node in enumerate(nodes) for name in filter(None, node.output)}
    for index, reads in enumerate(sharded.model.reads):
        for name in reads:
            readers.setdefault(name, []).append(index)
    pairs = []
    for index, (node, origin) in enumerate(zip(nodes, origins)):
        if origin.source >= 0:
            continue
        reading = readers.get(node.output[0], [])
        remote = [reader for reader in reading if origins[reader].device != origin.device]
        maker = producer.get(next(iter(node.input), ""), -1)
        if len(reading) == 1 and not remote and origins[reading[0]].source < 0:
            pairs.append((index, reading[0]))
        elif remote and node.op_type == "Slice" and maker >= 0 and origins[maker].device == origin.device:
            pairs.append((index, maker))
    return pairs
