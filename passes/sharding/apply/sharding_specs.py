"""Layouts as sharding specifications of ONNX, and back.

ONNX cuts an axis into equal shards and says on which devices each is (docs/proposals/0006 of ONNX, and IR.md since IR
version 11). Shards may be smaller than the parts of devices. So an axis is cut into the fewest equal shards of which
every part is a run, and each shard names its devices. Of 8 rows, on two devices:

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
from itertools import chain, pairwise

from onnx import ShardingSpecProto

from onnxplace.errors import format_count
from onnxplace.model.device_metadata import list_groups
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout

MAX_SHARDS = 1 << 16
"""A specification has a number for each shard, of 2 bytes, or of 11 for a group."""
MAX_FACTORS = 64
"""An axis has no more factors above 1."""


def specify(
    name: str, layout: Layout | None, shape: Sequence[int], division: Division, devices: Sequence[int] = ()
) -> ShardingSpecProto | None:
    """Return the specification of a value, None for what ONNX cannot express, as for a value without a name or layout.

    Args:
        name: The tensor.
        layout: Its layout.
        shape: Its whole shape.
        division: How the axes of the group are divided.
        devices: The positions of the group's devices in the configuration; the first ones by default.

    >>> specify("y", Layout(0, 1, 4), [8], Division((3.0, 1.0))).device
    [0, 0, 0, 1]
    """
    if not name or layout is None or layout == PARTIAL or layout.valid:
        return None
    spec, groups = ShardingSpecProto(tensor_name=name), dict[tuple[int, ...], int]()
    inner, parts = 1, [(0, 1)] * division.count  # a whole value is one shard
    if layout.is_split:
        inner = -layout.outer if layout.is_in_runs else shape[layout.axis] // layout.outer
        parts = list(division.held(layout._replace(outer=1), inner))
    if (shards := inner // math.gcd(inner, *chain(*parts))) > MAX_SHARDS:
        return None
    # Between two bounds of parts, all rows are on the same devices.
    for low, high in pairwise(sorted(set(chain(*parts)))):
        group = tuple(number for number, part in zip(devices or range(len(parts)), parts) if part[0] <= low < part[1])
        key = groups.setdefault(group, -1 - len(groups)) if len(group) > 1 else group[0]
        spec.device.extend([key] * (shards * (high - low) // inner))
    for group, key in groups.items():
        spec.index_to_device_group_map.add(key=key, value=group)
    # The split factor of the axis comes last; those in front of it are whole.
    if layout.is_split:
        factors = spec.sharded_dim.add(axis=layout.axis).simple_sharding
        if layout.outer != 1:
            factors.add(dim_value=None if layout.is_in_runs else layout.outer, num_shards=1)
        factors.add(dim_value=inner, num_shards=shards)
    return spec


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
    groups = list_groups(spec) or [(number,) for number in numbers]
    owned = [[shard for shard, group in enumerate(groups) if number in group] for number in numbers]
    if set(chain(*groups)) != set(numbers):
        return f"it is on devices {sorted(set(chain(*groups)))}, expected {list(numbers)}"
    # A layout splits one factor of one axis.
    split = [(item, part) for item in spec.sharded_dim for part in item.simple_sharding if part.num_shards != 1]
    if not split:
        return REPLICATED
    dimension, counts, shards = split[0][0], [part.num_shards for _, part in split], len(groups)
    if counts != [shards]:
        return f"{counts} shards are on {shards} devices or groups, expected shards of one axis with one each"
    axis, factors = dimension.axis, [part.dim_value for part in dimension.simple_sharding]
    size = shape[axis] if -len(shape) <= axis < len(shape) else 0
    if size < 1 or len(factors) > MAX_FACTORS:
        return f"shape {list(shape)} has no rows along axis {axis} in {format_count(len(factors), 'factor')}"
    known = math.prod(filter(None, factors))
    if factors.count(0) > 1 or size % known or (0 not in factors and known != size):
        return f"axis {axis} has {' times '.join(str(factor or '?') for factor in factors)} rows, and not {size}"
    # The axis is seen as [outer, inner], and the second of them is split.
    place = [part.num_shards for part in dimension.simple_sharding].index(shards)
    inner = math.prod(factor or size // known for factor in factors[place:])
    outer = math.prod(factors[:place]) or -inner  # an open factor in front is a number of runs
    cuts = division.cuts(inner) if inner % shards else range(0, inner + 1, inner // shards)
    if len(cuts) != shards + 1 or any(own[-1] - own[0] >= len(own) for own in owned):
        return f"{inner} rows in {shards} shards are no run of equal ones on each device"
    parts = [(cuts[own[0]], cuts[own[-1] + 1]) for own in owned]
    # Blocks that the division shares out so, or rows that only `hold` describes.
    layout = division.split(axis % len(shape), size, outer, inner // math.gcd(inner, *chain(*parts)))
    if layout is not None and list(division.held(layout._replace(outer=1), inner)) == parts:
        return layout
    if outer == 1 and all(low <= high <= end <= top for (low, end), (high, top) in pairwise(parts)):
        return division.hold(axis % len(shape), inner, parts)
    return f"no layout has rows {', '.join(f'{low}-{high}' for low, high in parts)} of {inner} on its devices"
