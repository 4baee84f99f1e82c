"""Layouts as sharding specifications of ONNX, and back.

ONNX cuts an axis into equal shards and says on which devices each is (docs/proposals/0006 of ONNX, and IR.md since IR
version 11). That is less than it seems and more than it needs: shards may be smaller than the parts of devices. So an
axis is cut into the fewest equal shards of which every part is a run, and each shard names its devices. Of 8 rows, on
two devices:

    rows of device 0, 1    num_shards    device                               index_to_device_group_map
    0-4     4-8            2             0, 1
    0-6     6-8            4             0, 0, 0, 1                           uneven: a device has several shards
    0-5     3-8            8             0, 0, 0, -1, -1, 1, 1, 1             -1: [0, 1]; a group has overlapping rows
    0-8     0-8            not split     -1                                   -1: [0, 1]; replicated

A negative number is a group of devices, which all have that shard: copies are written so, too.

Several `simple_sharding` of an axis are the axes that a reshape has fused into it, the slowest first; not parts one
after the other. An axis of q, k and v, each split, is `(3 of 1 shard, 64 of 2 shards)`; runs of 64 in any number are
`(unnamed of 1 shard, 64 of 2 shards)`.

ONNX cannot express partial values (summands), nor rows that a device has but that are not valid. The cut of more than
MAX_SHARDS shards is left out, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from onnx import ShardedDimProto, ShardingSpecProto

from onnxplace.model.device_metadata import list_groups
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout, Rows

MAX_SHARDS = 1 << 16
"""A specification has a number for each shard: 128 KB of them at most."""


def specify(
    name: str, layout: Layout, shape: Sequence[int], division: Division, devices: Sequence[int] = ()
) -> ShardingSpecProto | None:
    """Return the specification of a value, None for what ONNX cannot express.

    Args:
        name: The tensor.
        layout: Its layout.
        shape: Its whole shape.
        division: How the axes of the group are divided.
        devices: The positions of the group's devices in the configuration; the first ones by default.

    >>> specify("y", Layout(0, 1, 4), [8], Division((3.0, 1.0))).device
    [0, 0, 0, 1]
    """
    if layout == PARTIAL or layout.valid:
        return None
    numbers = tuple(devices or range(division.count))
    inner, parts = 1, [(0, 1)] * division.count  # a whole value is one shard
    if layout.is_split:
        inner = -layout.outer if layout.is_in_runs else shape[layout.axis] // layout.outer
        parts = list(division.held(layout._replace(outer=1), inner))
    if (shards := _count_shards(inner, parts)) > MAX_SHARDS:
        return None
    spec, keys = ShardingSpecProto(tensor_name=name), dict[tuple[int, ...], int]()
    for low, high in pairwise(sorted({bound for part in parts for bound in part})):
        group = tuple(number for number, part in zip(numbers, parts) if part[0] <= low < part[1])
        if group not in keys:
            groups = spec.index_to_device_group_map
            keys[group] = group[0] if len(group) == 1 else groups.add(key=-1 - len(groups), value=group).key
        spec.device.extend([keys[group]] * (shards * (high - low) // inner))
    if layout.is_split:
        dimension = spec.sharded_dim.add(axis=layout.axis)
        if layout.outer != 1:
            rows = dimension.simple_sharding.add(num_shards=1)
            if not layout.is_in_runs:
                rows.dim_value = layout.outer
        dimension.simple_sharding.add(dim_value=inner, num_shards=shards)
    return spec


def _count_shards(inner: int, parts: Sequence[Rows]) -> int:
    """Return the least number of equal shards of which each part is a run."""
    return inner // math.gcd(inner, *(bound for part in parts for bound in part))


def read_layout(
    spec: ShardingSpecProto, shape: Sequence[int], division: Division, devices: Sequence[int] = ()
) -> Layout | str:
    """Return the layout that a specification expresses, or the reason why it expresses none of ours.

    The arguments are those of `specify`. Without devices in the specification, its shards are on those of the group,
    in order. Where shards cannot be equal, ONNX leaves the cut to the backend: it is the one of the division.

    >>> read_layout(ShardingSpecProto(device=[0, 1], sharded_dim=[{"axis": -1}]), [3, 5], Division((1.0, 1.0)))
    Layout(axis=-1, outer=1, blocks=0, rows=(), valid=())
    """
    numbers = tuple(devices or range(division.count))
    split = [item for item in spec.sharded_dim if any(part.num_shards != 1 for part in item.simple_sharding)]
    if len(split) > 1:
        return f"axes {' and '.join(str(item.axis) for item in split)} are split at once"
    if split and not -len(shape) <= split[0].axis < len(shape):
        return f"axis {split[0].axis} is none of its {len(shape)} axes"
    axis = split[0].axis % len(shape) if split else 0
    factors = _read_factors(split[0], shape[axis]) if split else (1, 1, 1)
    if isinstance(factors, str):
        return factors
    outer, inner, shards = factors
    groups = list_groups(spec) or [(number,) for number in numbers]
    owned: dict[int, list[int]] = {number: [] for number in numbers}
    for shard, group in enumerate(groups):
        if not group or not owned.keys() >= set(group):
            return f"shard {shard} is on devices {group}, expected some of {numbers}"
        for number in group:
            owned[number].append(shard)
    if missing := [number for number, own in owned.items() if not own]:
        return f"device {missing[0]} has no part"
    if not split:
        return REPLICATED
    if len(groups) != shards:
        return f"{shards} shards are on {len(groups)} devices or groups"
    if inner % shards:
        in_order = groups == [(number,) for number in numbers]
        natural = division.split(axis, shape[axis], outer) if in_order else None
        return natural or f"{inner} rows are not {shards} equal shards"
    if any(own[-1] - own[0] >= len(own) for own in owned.values()):
        return "a device has shards that are not next to each other"
    parts = [(own[0] * inner // shards, (own[-1] + 1) * inner // shards) for own in owned.values()]
    if all(part == (0, inner) for part in parts):
        return REPLICATED
    layout = division.split(axis, shape[axis], outer, _count_shards(inner, parts))
    if layout is not None and list(division.held(layout._replace(outer=1), inner)) == parts:
        return layout
    if outer == 1 and all(low <= high and end <= top for (low, end), (high, top) in pairwise(parts)):
        return division.hold(axis, inner, parts)
    return f"no layout of ours has rows {', '.join(f'{low}-{high}' for low, high in parts)} of {inner} on its devices"


def _read_factors(dimension: ShardedDimProto, size: int) -> tuple[int, int, int] | str:
    """Return `outer` of the layout, the size of what is split, and the number of shards; or why there are none."""
    factors = dimension.simple_sharding
    sizes = [item.dim_value if item.HasField("dim_value") else 0 for item in factors]
    place = next(index for index, item in enumerate(factors) if item.num_shards != 1)
    if any(item.num_shards != 1 for item in factors[place + 1 :]) or factors[place].num_shards < 1:
        return f"axis {dimension.axis} is split into {' and '.join(str(item.num_shards) for item in factors)} shards"
    known = math.prod(filter(None, sizes))
    if sizes.count(0) > 1 or min(sizes) < 0 or size % known or (0 not in sizes and known != size):
        return f"axis {dimension.axis} has size {size}, and not {' times '.join(str(size or '?') for size in sizes)}"
    inner = math.prod(number or size // known for number in sizes[place:])
    outer = -inner if 0 in sizes[:place] else math.prod(sizes[:place])
    return outer, inner, factors[place].num_shards
