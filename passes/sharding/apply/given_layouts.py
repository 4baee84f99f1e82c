"""Layouts that are given: those that the nodes of a model have as sharding specifications of ONNX.

A model file is a map of layouts. A node of the compiled model keeps the strategies that agree with what the node of the
same name has there; nodes without specifications are free, and one on a single device is computed whole. The devices of
the file's configuration are those of the group, by position. Its specifications say how much each of them gets.

A specification of a result says how it is there after the node and the exchange that follows it. So where a product's
summed axis is split, as its inputs say, its result may be given as whole, or split: it is made as summands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxplace.errors import TargetError, UsageError, format_count, format_names
from onnxplace.model.device_metadata import ShardedNode
from onnxplace.model.node_metadata import suggest_nodes
from onnxplace.passes.sharding.apply.sharding_specs import read_layout
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space.strategy_space import StrategySpace


def find_shares(given: Mapping[str, ShardedNode], shares: Sequence[float], where: str) -> tuple[float, ...]:
    """Return the share of each device with which axes are cut as the specifications say.

    Of a number of equal blocks, the first devices have their share, rounded (`Division.cuts`). So each cut of a
    specification leaves this share an interval. All of them have the middle of all intervals in common, unless they
    contradict each other: then a node is found that cannot be split as one of them says.

    Args:
        given: The nodes with specifications.
        shares: Those by the speed of the devices, which are kept if axes are cut so.
        where: The place for errors.

    Raises:
        TargetError: The specifications are for another number of devices.
    """
    if len(shares) != (ways := max((len(item.devices) for item in given.values()), default=len(shares))):
        message = f"its layouts are for {format_count(ways, 'device')}, and {len(shares)} would share operators"
        hint = f"name as many in --devices, or --shard {ways}" if ways > 1 else "take it as --device-map"
        raise TargetError("T005", message, where=where, hint=hint)
    cut = [(item.devices, spec.device) for item in given.values() for spec in item.specs if spec.sharded_dim]
    # Parts that have copies are equal, and those that overlap are about as large as others: they say nothing.
    own = [[[*owner].count(number) for number in devices] for devices, owner in cut if {*owner} == {*devices}]
    shards = np.array([row for row in own if len(row) == ways] or [[1] * ways])  # [specification, device]
    cuts, blocks = shards.cumsum(axis=1), shards.sum(axis=1, keepdims=True)
    low, high = ((cuts - 0.5) / blocks).max(axis=0) - 1e-9, ((cuts + 0.5) / blocks).min(axis=0) + 1e-9
    bounds, middle = np.cumsum(shares) / sum(shares), (low + high) / 2
    bounds = bounds if ((low <= bounds) & (bounds <= high)).all() else middle
    return tuple(np.diff(bounds, prepend=0.0).round(12).tolist())  # equal shares are equal numbers


def restrict_layouts(space: StrategySpace, given: Mapping[str, ShardedNode], where: str) -> StrategySpace:
    """Return the space with only those strategies of each node that agree with its specifications.

    Raises UsageError for nodes that the model lacks, and where no strategy of a node agrees.
    """
    model, strategies = space.facts.model, list(space.strategies)
    numbers = {node.name: index for index, node in enumerate(model.nodes)}
    if (missing := given.keys() - numbers.keys() - {*model.removed}) or not given:
        message = f"expected layouts of nodes of this model, got {format_names(sorted(missing)) or 'none'}"
        raise UsageError("U020", message, where=where, hint=suggest_nodes("", [*numbers]))
    for index, (node, specs, devices) in ((numbers[name], item) for name, item in given.items() if name in numbers):
        # By position, since optimisations rename values; from the end for results, before which captured values are.
        slots = [*enumerate(node.input), *enumerate(node.output, -len(node.output))]
        shapes = [space.facts.shapes.get(name, ()) for name in (*model.operands[index], *model.nodes[index].output)]
        if len(devices) < space.division.count:
            strategies[index] = [item for item in strategies[index] if {*item.layouts} <= {REPLICATED, None}]
        for spec in specs:
            places = [place for place, name in slots if name == spec.tensor_name]
            values = dict.fromkeys(filter(None, (*node.input, *node.output)))
            layout: Layout | str = f"its values are {format_names(values)}"
            if places:
                layout = read_layout(spec, shapes[places[0]], space.division, devices)
            held = [(item, {item.layouts[place] for place in places}) for item in strategies[index]]
            agreeing = [item for item, layouts in held if layout in layouts]
            if not agreeing and isinstance(layout, Layout) and max(places, default=0) < 0:
                agreeing = [item for item, layouts in held if PARTIAL in layouts]
            if not agreeing:
                possible = ", ".join(sorted({str(own) for _, layouts in held for own in layouts})) or "no such value"
                message = f"node {node.name!r} ({node.op_type}) cannot have {spec.tensor_name!r} as given: {layout}"
                raise UsageError("U023", message, where=where, hint=f"next to what else is given, it can: {possible}")
            strategies[index] = agreeing
    return replace(space, strategies=tuple(strategies))
