"""Write a model whose batch is computed in parts: nodes that split samples once per part, all others once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import NodeProto, StringStringEntryProto

from onnxplace.passes.sharding.choice import Choice
from onnxplace.passes.sharding.exchange_costs import ExchangeCosts
from onnxplace.passes.sharding.exchanges import NodeOrigin
from onnxplace.passes.sharding.layouts import REPLICATED, Layout
from onnxplace.passes.sharding.rewrite import ShardedModel, ShardedModelWriter
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy
from onnxplace.training_step import PHASE_KEY

SHARED = -1
"""The part of nodes that are computed once."""


def write_parts(space: StrategySpace, choice: Choice, costs: ExchangeCosts, replica: Sequence[int]) -> ShardedModel:
    """Return the model with micro-batches in place of devices: values that are not split exist once.

    Summands of gradients are added up in the order of the parts, one after the other, so that one sum is held: first
    those of each replica, then the sums of the replicas.

    Args:
        space: The strategies.
        choice: Of one strategy per node.
        costs: Of exchanges.
        replica: Per part, in ascending order.
    """
    return _PartsWriter(space, choice, costs, replica).write()


class _PartsWriter(ShardedModelWriter):
    """Writes parts that follow one another in time."""

    part_suffix = "batch"

    def __init__(self, space: StrategySpace, choice: Choice, costs: ExchangeCosts, replica: Sequence[int]) -> None:
        super().__init__(space, choice, costs)
        self.replica = replica
        self.producers: dict[str, NodeProto] = {}

    def get(self, name: str, layout: Layout, device: int) -> str:
        return super().get(name, layout, 0 if layout == REPLICATED else device)

    def add(self, proto: NodeProto, origin: NodeOrigin) -> None:
        super().add(proto, origin)
        for name in proto.output:
            self.producers[name] = proto

    def add_node(self, index: int, strategy: Strategy) -> None:
        is_shared = all(layout in (None, REPLICATED) for layout in (*strategy.inputs, *strategy.outputs))
        if not is_shared:
            super().add_node(index, strategy)
            return
        for name, layout in zip(self.model.nodes[index].output, strategy.outputs):
            if name and layout is not None:
                self.layouts[name] = layout
        self.add_single(index)

    def add_single(self, index: int) -> None:
        super().add_single(index)
        self.origins[-1] = NodeOrigin(SHARED, index)

    def exchange_node(
        self, op: str, inputs: Sequence[str], result: str, device: int, moved_bytes: int, **attributes: Any
    ) -> str:
        """Add a node that cuts, joins or adds up parts; it is marked as the node whose value it takes."""
        name = super().exchange_node(op, inputs, result, device, moved_bytes, **attributes)
        source = next((self.producers[item] for item in inputs if item in self.producers), None)
        if source is not None:
            self.nodes[-1].metadata_props.extend(source.metadata_props)
        elif self.model.training is not None:  # a part of an input
            self.nodes[-1].metadata_props.append(StringStringEntryProto(key=PHASE_KEY, value="forward"))
        return name

    def all_reduce(self, name: str, device: int) -> str:
        self.count("all-reduce", name)
        totals: dict[int, str] = {}
        for part, replica in enumerate(self.replica):
            piece = self.get(name, self.layouts[name], part)
            total = totals.get(replica)
            totals[replica] = piece if total is None else self._add_up(name, total, piece, part)
        first, *others = totals.values()
        for other in others:
            first = self._add_up(name, first, other, SHARED)
        return first

    def _add_up(self, name: str, total: str, piece: str, part: int) -> str:
        result = self.part_name(name, REPLICATED, max(part, 0))
        return self.exchange_node("Add", [total, piece], result, part, 3 * self.facts.bytes(name))
