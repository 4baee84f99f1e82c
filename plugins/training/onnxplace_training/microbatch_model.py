"""Write a model whose batch is computed in parts: nodes that split samples once per part, all others once.

With replicas, each group of devices computes its parts. Each parameter is owned by one replica, which adds up the
gradients of all, and computes its new value and moments; the other replicas get a copy of the value at the start of
each step. So a step sends each gradient and each parameter once per other replica, as an all-reduce does, but in whole
tensors: nothing is cut or joined (optimiser states without redundancy: ZeRO, SC 2020).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import NodeProto, StringStringEntryProto, helper

from onnxplace.facts import Profile
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import has_subgraphs, iterate_reads, rename_reads
from onnxplace.model_metadata import PHASE_KEY
from onnxplace.passes.sharding.apply.exchanges import NodeOrigin
from onnxplace.passes.sharding.apply.sharded_model import ShardedModel, ShardedModelWriter
from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.rules.layouts import REPLICATED, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, is_unrepeatable
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from onnxplace.utils.names import claim_name

SHARED = -1
"""The part of nodes that are computed once."""

NO_UNIT = -1


def write_parts(
    space: StrategySpace, choice: LayoutChoice, costs: ExchangeCosts, replica: Sequence[int]
) -> ShardedModel:
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

    def __init__(
        self, space: StrategySpace, choice: LayoutChoice, costs: ExchangeCosts, replica: Sequence[int]
    ) -> None:
        super().__init__(space, choice, costs)
        self.replica = replica
        self.producers: dict[str, NodeProto] = {}

    def get(self, name: str, layout: Layout, device: int) -> str:
        return super().get(name, layout, 0 if layout == REPLICATED else device)

    def add(self, proto: NodeProto, origin: NodeOrigin) -> None:
        super().add(proto, origin)
        for name in proto.output:
            self.producers[name] = proto

    def add_node(self, index: int, strategy: NodeStrategy) -> None:
        if not strategy.is_whole:
            super().add_node(index, strategy)
            return
        self.layouts.update(dict.fromkeys(filter(None, self.model.nodes[index].output), REPLICATED))
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


def find_dependent_values(model: Model, roots: frozenset[str]) -> frozenset[str]:
    """Return the values that depend on some roots, with these."""
    names = set(roots)
    for node, reads in zip(model.nodes, model.reads):
        if not names.isdisjoint(reads):
            names.update(filter(None, node.output))
    return frozenset(names)


@dataclass(frozen=True)
class ReplicatedModel:
    """A model in parts, with the replica of each node."""

    sharded: ShardedModel
    replica: Ints
    """Per node."""


def divide_parts(count: int, speeds: Sequence[float]) -> Ints:
    """Return the replica of each of `count` parts: consecutive ones, by the speeds of the replicas, at least one each.

    >>> divide_parts(4, [3.0, 1.0]).tolist()
    [0, 0, 0, 1]
    """
    replicas = len(speeds)
    parts = np.ones(replicas, dtype=np.int64)
    for _ in range(count - replicas):
        # The replica that would be done first with one more.
        parts[int(((parts + 1) / np.array(speeds)).argmin())] += 1
    return np.repeat(np.arange(replicas, dtype=np.int32), parts)


def assign_replicas(
    sharded: ShardedModel,
    states: Mapping[str, str],
    profile: Profile,
    seconds: Floats,
    of_part: Ints,
    speeds: Sequence[float],
    facts: TensorFacts,
    samples: Collection[str],
) -> ReplicatedModel:
    """Return the model with copies of parameters for the replicas that do not own them.

    What follows from parameters and constants alone, such as transposed weights, each replica computes for itself.

    Args:
        sharded: The model in parts.
        states: Carried state -> the output that it becomes.
        profile: Of the undivided model.
        seconds: Per node of the undivided model.
        of_part: Replica per part.
        speeds: Per replica.
        facts: Of the values of the undivided model.
        samples: Inputs that hold samples.
    """
    units = _find_units(sharded, states, profile)
    replica = _choose_owners(sharded, units, seconds, of_part, speeds)
    repeated = _repeat_kept(ReplicatedModel(sharded, replica), units, samples)
    return _distinguish_replicas(_copy_states(repeated.sharded, states, repeated.replica, facts))


def _find_units(sharded: ShardedModel, states: Mapping[str, str], profile: Profile) -> list[int]:
    """Return, per node that is computed once, the parameter or other state that it works for; `NO_UNIT` for others."""
    model, origins = sharded.model, sharded.origins
    training = profile.training
    units = [NO_UNIT] * len(origins)
    if training is not None:
        shared = [origin.source if origin.device == SHARED else -1 for origin in origins]
        units = [int(training.parameter[source]) if source >= 0 else NO_UNIT for source in shared]
    following = len(training.step.parameters) if training is not None else 0
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output}
    for output in states.values():
        index = producer.get(model.sources.get(output, output), -1)
        if index >= 0 and origins[index].device == SHARED and units[index] == NO_UNIT:
            units[index] = following
            following += 1
    _add_gradient_sums(sharded, units)
    return units


def _add_gradient_sums(sharded: ShardedModel, units: list[int]) -> None:
    """Give the sums of gradients the unit that reads them, in place, if it is a single one."""
    model, origins = sharded.model, sharded.origins
    readers: dict[str, set[int]] = {}
    for index in range(len(origins) - 1, -1, -1):
        if origins[index].device == SHARED and origins[index].source < 0:  # the sum of a gradient
            found = set[int]().union(*(readers.get(name, set()) for name in model.nodes[index].output)) - {NO_UNIT}
            units[index] = found.pop() if len(found) == 1 else NO_UNIT
        if origins[index].device == SHARED:
            for name in model.reads[index]:
                readers.setdefault(name, set()).add(units[index])


def _choose_owners(
    sharded: ShardedModel, units: Sequence[int], seconds: Floats, of_part: Ints, speeds: Sequence[float]
) -> Ints:
    """Return the replica of each node: units by time, the longest first, each to the replica that is done first."""
    origins = sharded.origins
    load: dict[int, float] = {}
    for unit, origin in zip(units, origins):
        if unit != NO_UNIT:
            load[unit] = load.get(unit, 0.0) + (float(seconds[origin.source]) if origin.source >= 0 else 0.0)
    free = np.zeros(len(speeds))
    owner = {NO_UNIT: 0}
    for unit in sorted(load, key=lambda item: (-load[item], item)):
        done = free + load[unit] / np.array(speeds)
        owner[unit] = int(done.argmin())
        free[owner[unit]] = done.min()
    pairs = zip(units, origins)
    return np.array(
        [owner[unit] if origin.device == SHARED else of_part[origin.device] for unit, origin in pairs], dtype=np.int32
    )


def _repeat_kept(before: ReplicatedModel, units: Sequence[int], samples: Collection[str]) -> ReplicatedModel:
    """Let each replica compute for itself what does not depend on samples, and works for no parameter."""
    model, origins = before.sharded.model, before.sharded.origins
    varying = find_dependent_values(model, frozenset(samples))
    is_kept = [
        origin.device == SHARED
        and unit == NO_UNIT
        and varying.isdisjoint(node.output)
        and not is_unrepeatable(node)
        and not has_subgraphs(node)
        for node, origin, unit in zip(model.nodes, origins, units)
    ]
    homes_of_nodes = _find_homes(model, before.replica, is_kept)
    taken = {name for node in model.nodes for name in (node.name, *node.output)} | model.input_names
    versions: dict[tuple[str, int], str] = {}
    nodes, new_origins, replica = list[NodeProto](), list[NodeOrigin](), list[int]()
    for node, origin, reads, homes in zip(model.nodes, origins, model.reads, homes_of_nodes):
        for number, home in enumerate(sorted(homes)):
            copy = deepcopy(node)
            rename_reads(copy, {name: versions[name, home] for name in reads if (name, home) in versions})
            if number:
                versions |= _rename_results(copy, home, taken)
            nodes.append(copy)
            new_origins.append(origin)
            replica.append(home)
    sharded = replace(before.sharded, model=replace(model, nodes=tuple(nodes)), origins=tuple(new_origins))
    return ReplicatedModel(sharded, np.array(replica, dtype=np.int32))


def _rename_results(node: NodeProto, home: int, taken: set[str]) -> dict[tuple[str, int], str]:
    """Give a copy of a node and its results new names, in place; return these by old name and replica."""
    node.name = claim_name(f"{node.name}/replica{home}", taken)
    names = {name: claim_name(f"{name}/replica{home}", taken) for name in node.output if name}
    node.output[:] = [names.get(name, "") for name in node.output]
    return {(name, home): version for name, version in names.items()}


def _find_homes(model: Model, replica: Ints, is_kept: Sequence[bool]) -> list[set[int]]:
    """Return, per node, the replicas that compute it: of nodes that are kept, all whose nodes need them.

    The first replica also has what is returned, and what none needs.
    """
    returned = {model.sources.get(output.name, output.name) for output in model.outputs}
    homes_of_nodes = [{int(home)} for home in replica]
    needed: dict[str, set[int]] = {}
    for index in reversed(range(len(model.nodes))):
        if is_kept[index]:
            outputs = model.nodes[index].output
            homes = set[int]().union(*(needed.get(name, set()) for name in outputs))
            homes_of_nodes[index] = homes if homes and returned.isdisjoint(outputs) else homes | {0}
        for name in model.reads[index]:
            needed.setdefault(name, set()).update(homes_of_nodes[index])
    return homes_of_nodes


def _copy_states(
    sharded: ShardedModel, states: Mapping[str, str], replica: Ints, facts: TensorFacts
) -> ReplicatedModel:
    """Let replicas read copies of the states that others own, since a state stays where its new value is made."""
    model = sharded.model
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output}
    home = {
        name: int(replica[index])
        for name, output in states.items()
        if (index := producer.get(model.sources.get(output, output), -1)) >= 0
    }
    taken = {name for node in model.nodes for name in (node.name, *node.output)} | model.input_names
    copies: dict[tuple[str, int], str] = {}
    for node, own in zip(model.nodes, replica.tolist()):
        renamed = {}
        for name in iterate_reads(node):
            if home.get(name, own) != own:
                if (name, own) not in copies:
                    copies[name, own] = claim_name(f"{name}/replica{own}", taken)
                renamed[name] = copies[name, own]
        if renamed:
            rename_reads(node, renamed)
    nodes = [helper.make_node("Identity", [name], [copy], name=copy) for (name, _), copy in copies.items()]
    for node in nodes:
        node.metadata_props.append(StringStringEntryProto(key=PHASE_KEY, value="forward"))
    origins = [NodeOrigin(SHARED, -1, 2 * facts.bytes(name)) for name, _ in copies]
    owners = np.array([home[name] for name, _ in copies], dtype=np.int32)
    return ReplicatedModel(
        replace(
            sharded,
            model=replace(model, nodes=(*nodes, *model.nodes)),
            origins=(*origins, *sharded.origins),
        ),
        np.concatenate([owners, replica]),
    )


def _distinguish_replicas(after: ReplicatedModel) -> ReplicatedModel:
    """Return the model with another negative part for the whole nodes of each replica: they share no kernel."""
    origins = tuple(
        replace(origin, device=SHARED - home) if origin.device == SHARED else origin
        for origin, home in zip(after.sharded.origins, after.replica.tolist())
    )
    return replace(after, sharded=replace(after.sharded, origins=origins))
