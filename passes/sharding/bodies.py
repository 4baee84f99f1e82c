"""If, Loop and Scan, split along axes that their subgraphs carry through.

Devices cannot exchange values inside a subgraph, which each of them runs by itself. So a layout of one operand is
followed through it: each inner node must take what it reads as it is there, by the rules of its operator, and what it
then asks of other operands, these get, too. If that ends without a contradiction, and states leave a turn of a loop as
they entered it, the whole node is split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from onnx import GraphProto

from onnxplace.model import iterate_subgraphs
from onnxplace.passes.sharding.known_shapes import infer_all_shapes
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.node_strategies import NodeStrategy
from onnxplace.passes.sharding.subgraph_models import Interface, Port, build_body, is_steady, read_interface
from onnxplace.passes.sharding.tensor_facts import TensorFacts

if TYPE_CHECKING:
    from onnxplace.passes.sharding.strategy_space import StrategySpace


@dataclass(frozen=True)
class BodySplit:
    """A subgraph as a model of its own, with a strategy for each of its nodes."""

    graph: GraphProto
    space: StrategySpace
    strategies: tuple[NodeStrategy, ...]
    inputs: Mapping[str, Layout]
    """Layout of each input and captured value."""
    outputs: tuple[Layout, ...]


def list_body_strategies(
    facts: TensorFacts, index: int, division: Division, build_space: Callable[[TensorFacts, Division], StrategySpace]
) -> list[NodeStrategy]:
    """Return the strategies that split a node with subgraphs; `build_space` lists those of the inner nodes."""
    interface = read_interface(facts.model, index, facts.shapes)
    if interface is None:
        return []
    graphs = [*iterate_subgraphs(facts.model.nodes[index])]
    spaces = []
    for number, graph in enumerate(graphs):
        body = _describe_body(facts, index, interface, number)
        if body is None or graph.sparse_initializer or len({value.name for value in graph.output}) < len(graph.output):
            return []
        spaces.append(build_space(body, division))
    return _BodyFlow(facts, index, interface, graphs, spaces).list_strategies()


def _describe_body(facts: TensorFacts, index: int, interface: Interface, number: int) -> TensorFacts | None:
    """Return the facts of a subgraph as a model; None if a shape is unknown, or changes from turn to turn."""
    weights = {name: facts.shapes[name] for name in facts.model.operands[index] if name in facts.is_weight}
    sizes = [facts.shapes, *({**weights, **other} for other in (*facts.others, *facts.empty))]
    models = [build_body(facts.model, index, interface, number, shapes, facts.types) for shapes in sizes]
    inferred = [{} if model is None else infer_all_shapes(model) for model in models]
    is_stable = (
        is_steady(facts.model.nodes[index], interface, number, *pair) for pair in zip(sizes, inferred) if pair[1]
    )
    if models[0] is None or not all(is_stable):
        return None
    empty = len(inferred) - len(facts.empty)
    return TensorFacts.of_body(models[0], inferred[0], inferred[1:empty], inferred[empty:])


class _BodyFlow:
    """Follows layouts of operands through the subgraphs of a node."""

    def __init__(
        self,
        facts: TensorFacts,
        index: int,
        interface: Interface,
        graphs: Sequence[GraphProto],
        spaces: Sequence[StrategySpace],
    ) -> None:
        self._facts, self._interface, self._graphs, self._spaces = facts, interface, graphs, spaces
        self._node, self._operands = facts.model.nodes[index], facts.model.operands[index]
        self._owners = {
            (port.graph, port.name): (position, port)
            for position, ports in interface.operands.items()
            for port in ports
        }

    def list_strategies(self) -> list[NodeStrategy]:
        """Return a strategy for each layout of an operand that can be followed to the end.

        Strategies with the same results are also taken together: each may split what the others leave whole, such as
        another branch.
        """
        found: dict[object, NodeStrategy] = {}
        together: dict[object, dict[int, Layout]] = defaultdict(dict)
        for position, layout in sorted(self._list_seeds()):
            if (strategy := self._follow({position: layout})) is not None:
                found.setdefault((strategy.inputs, strategy.outputs), strategy)
                for operand, other in enumerate(strategy.inputs):
                    if other is not None and other.is_split:
                        together[strategy.outputs].setdefault(operand, other)
        for demands in together.values():
            if (strategy := self._follow(demands)) is not None:
                found.setdefault((strategy.inputs, strategy.outputs), strategy)
        return [*found.values()]

    def _list_seeds(self) -> set[tuple[int, Layout]]:
        """Return the layouts of operands that some inner node can read."""
        seeds = set()
        for number, space in enumerate(self._spaces):
            for operands, strategies in zip(space.facts.model.operands, space.strategies):
                for name, layout in ((n, lay) for item in strategies for n, lay in zip(operands, item.inputs)):
                    if layout is not None and layout.is_split and (number, name) in self._owners:
                        position, port = self._owners[number, name]
                        seeds.add((position, port.leave(layout)))
        return seeds

    def _follow(self, demands: dict[int, Layout]) -> NodeStrategy | None:
        """Return the strategy in which operands have these layouts, and others what follows from them."""
        while True:
            demanded = dict(demands)
            flows: list[_GraphFlow] = []
            for number in range(len(self._graphs)):
                if (flow := self._follow_graph(number, demanded)) is None:
                    return None
                flows.append(flow)
            for operand, result in self._interface.states.items():
                (port,) = self._interface.results[result]
                layout = flows[0].layouts.get(port.name, REPLICATED)
                # A whole copy can be cut at the end of a turn.
                if layout == PARTIAL or (layout != REPLICATED and demanded.setdefault(operand, layout) != layout):
                    return None
            if not all(self._is_free(self._operands[position], layout) for position, layout in demanded.items()):
                return None
            if demanded == demands:
                return self._build(flows, demands)
            demands = demanded

    def _is_free(self, name: str, layout: Layout) -> bool:
        fixed = self._facts.fixed.get(name)
        return layout == REPLICATED or (
            fixed is not None and self._facts.can_split(name) and (not layout.is_split or fixed[layout.axis])
        )

    def _follow_graph(self, number: int, demanded: dict[int, Layout]) -> _GraphFlow | None:
        """Choose a strategy for each inner node, and add what it asks of operands; None for a contradiction."""
        space = self._spaces[number]
        flow = _GraphFlow({value.name: REPLICATED for value in space.facts.model.inputs}, [])
        for (graph, name), (position, port) in self._owners.items():
            if graph == number:
                flow.layouts.pop(name, None)
                if position in demanded:
                    layout = port.enter(demanded[position])
                    if layout is None:
                        return None
                    flow.layouts[name] = layout
        inner_weights = {name for name in space.facts.is_weight if (number, name) not in self._owners}
        model = space.facts.model
        for node, operands, strategies in zip(model.nodes, model.operands, space.strategies):
            alone = (strategy for strategy in strategies if not strategy.exchanges_values)
            pairs = ((strategy, flow.weigh(operands, strategy, inner_weights)) for strategy in alone)
            weighed = [(strategy, weight) for strategy, weight in pairs if weight is not None]
            if not weighed:
                return None
            strategy, _ = min(weighed, key=lambda pair: pair[1])
            flow.strategies.append(strategy)
            for name, layout in zip(operands, strategy.inputs):
                if layout is not None and layout.is_split and name not in flow.layouts and name not in inner_weights:
                    position, port = self._owners[number, name]
                    if demanded.setdefault(position, port.leave(layout)) != port.leave(layout):
                        return None
                    flow.layouts[name] = layout
            flow.layouts.update((n, lay) for n, lay in zip(node.output, strategy.outputs) if lay is not None)
        return flow

    def _build(self, flows: Sequence[_GraphFlow], demands: Mapping[int, Layout]) -> NodeStrategy | None:
        """Return the strategy of the node; None if its subgraphs disagree, or split what all devices need."""
        states = {result: demands.get(operand, REPLICATED) for operand, result in self._interface.states.items()}
        wanted: dict[Port, Layout] = dict.fromkeys(self._interface.shared, REPLICATED)
        outputs: list[Layout | None] = []
        for position, name in enumerate(self._node.output):
            ports = self._interface.results[position]
            layouts = {port.leave(flows[port.graph].layouts.get(port.name, REPLICATED)) for port in ports}
            layouts |= {states[position]} if position in states else set()
            layout = max(layouts)  # of a whole and a split one, the split one, to which the other can be cut
            if not layouts <= {REPLICATED, layout} or (name and not self._is_free(name, layout)):
                return None
            wanted.update((port, inside) for port in ports if (inside := port.enter(layout)) is not None)
            outputs.append(layout if name else None)
        for port in self._interface.shared:
            if flows[port.graph].layouts.get(port.name, REPLICATED) != REPLICATED:
                return None
        inputs = tuple(
            demands.get(position, REPLICATED) if name else None for position, name in enumerate(self._operands)
        )
        return NodeStrategy(inputs, tuple(outputs), bodies=tuple(self._split_bodies(flows, demands, wanted)))

    def _split_bodies(
        self, flows: Sequence[_GraphFlow], demands: Mapping[int, Layout], wanted: Mapping[Port, Layout]
    ) -> Iterator[BodySplit]:
        for number, (graph, space, flow) in enumerate(zip(self._graphs, self._spaces, flows)):
            inputs = {value.name: REPLICATED for value in space.facts.model.inputs}
            for (owner, name), (position, port) in self._owners.items():
                if owner == number:
                    inputs[name] = port.enter(demands.get(position, REPLICATED)) or REPLICATED
            layouts = {port.name: layout for port, layout in wanted.items() if port.graph == number}
            outputs = tuple(layouts[value.name] for value in graph.output)
            yield BodySplit(graph, space, tuple(flow.strategies), inputs, outputs)


class _GraphFlow(NamedTuple):
    """The layouts of the values of a subgraph, and a strategy for each of its nodes."""

    layouts: dict[str, Layout]
    """Operands without a demand are left out."""
    strategies: list[NodeStrategy]

    def weigh(
        self, operands: Sequence[str], strategy: NodeStrategy, inner_weights: set[str]
    ) -> tuple[bool, int, int] | None:
        """Return how far a strategy is from taking its inputs as they are; None if it would need an exchange."""
        cut = asked = 0
        for name, want in zip(operands, strategy.inputs):
            have = want if name in inner_weights else self.layouts.get(name)
            if want is None or want == have or (have is None and want == REPLICATED):
                continue
            if not want.is_split or have not in (None, REPLICATED):
                return None
            cut, asked = cut + (have == REPLICATED), asked + (have is None)
        return PARTIAL in strategy.outputs, cut, asked
