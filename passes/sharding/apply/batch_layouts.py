"""Which strategies split a batch, and nothing else: the layouts that hold samples, and those of gradients.

Along a batch, activations are split, and weights, states and what follows from them alone stay whole. Layouts that hold
samples begin at the inputs of the model. They spread through the rules of operators, from inputs to outputs and from
outputs to inputs of nodes, so that values whose producer mixes all samples (a contrastive loss) are split again behind
it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxplace.model import Model
from onnxplace.passes.sharding.rules.layouts import Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.strategy_space import StrategySpace


def find_sample_inputs(model: Model) -> dict[str, int]:
    """Return the inputs that hold a sample per index of an axis, with that axis.

    These are the inputs with the first symbolic dimension of a first axis. A model without symbolic dimensions has
    samples along the first axis of all inputs that have the same size there, the size of the first input with an axis.
    States and inputs with a default value hold none.
    """
    candidates = [
        value for value in model.inputs if value.name not in model.states and not model.overridable(value.name)
    ]
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in candidates
        if value.type.HasField("tensor_type")
    }
    firsts = [sizes[0] for sizes in dims.values() if sizes]
    if not firsts:
        return {}
    batch = next((size for size in firsts if isinstance(size, str)), firsts[0])
    return {name: sizes.index(batch) for name, sizes in dims.items() if batch in sizes}


def find_dependent_values(model: Model, roots: frozenset[str]) -> frozenset[str]:
    """Return the values that depend on some roots, with these."""
    names = set(roots)
    for node, reads in zip(model.nodes, model.reads):
        if not names.isdisjoint(reads):
            names.update(filter(None, node.output))
    return frozenset(names)


def restrict_to_samples(space: StrategySpace, axes: Mapping[str, int], states: frozenset[str]) -> StrategySpace:
    """Return the space with the strategies that split samples, those that pass gradients on, and the whole ones.

    Args:
        space: The strategies of a model, for a division into micro-batches.
        axes: Input -> axis with the samples.
        states: Inputs that hold parameters and other carried states.
    """
    return _SampleLayouts(space, axes, states).restrict()


class _SampleLayouts:
    def __init__(self, space: StrategySpace, axes: Mapping[str, int], states: frozenset[str]) -> None:
        self._space, self._model = space, space.facts.model
        self._varying = find_dependent_values(self._model, frozenset(axes))
        states |= {name for name in self._model.input_names if self._model.overridable(name)}
        # Parameters, and what follows from them without a sample.
        self._kept = find_dependent_values(self._model, states) - self._varying
        self._layouts: dict[str, set[Layout]] = defaultdict(set)
        self._users: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self._model.nodes):
            for name in dict.fromkeys((*self._model.operands[index], *node.output)):
                if name:
                    self._users[name].append(index)
        self._seed(axes)

    def _seed(self, axes: Mapping[str, int]) -> None:
        shapes, division = self._space.facts.shapes, self._space.division
        for name, axis in axes.items():
            if name in shapes and (layout := division.split(axis, shapes[name][axis])) is not None:
                self._layouts[name].add(layout)

    def restrict(self) -> StrategySpace:
        queue = deque(range(len(self._model.nodes)))
        queued = [True] * len(queue)
        while queue:
            index = queue.popleft()
            queued[index] = False
            for user in self._spread(index):
                if not queued[user]:
                    queued[user] = True
                    queue.append(user)
        # Equal nodes share a sequence, which also tells the choice that their tables are equal.
        shared: dict[object, Sequence[NodeStrategy]] = {}
        strategies = []
        for index, options in enumerate(self._space.strategies):
            kept = tuple(number for number, item in enumerate(options) if number == 0 or self._is_allowed(index, item))
            key = id(options), kept
            strategies.append(shared.setdefault(key, tuple(options[number] for number in kept)))
        return replace(self._space, strategies=tuple(strategies))

    def _spread(self, index: int) -> list[int]:
        """Add the sample layouts that a node carries from value to value; return the nodes next to those values."""
        node, touched = self._model.nodes[index], list[int]()
        for strategy in self._space.strategies[index]:
            if not strategy.is_split or not self._is_allowed(index, strategy):
                continue
            for name, layout in zip(
                (*self._model.operands[index], *node.output), (*strategy.inputs, *strategy.outputs)
            ):
                if layout is not None and layout.is_split and layout not in self._layouts[name]:
                    self._layouts[name].add(layout)
                    touched += self._users[name]
        return touched

    def _is_allowed(self, index: int, strategy: NodeStrategy) -> bool:
        """Return whether a strategy splits samples, or passes summands on."""
        node = self._model.nodes[index]
        if self._varying.isdisjoint(node.output) or strategy.overlaps or strategy.shares_range:
            return False
        if not strategy.is_split:
            return True
        pairs = [
            (name, layout)
            for name, layout in zip((*self._model.operands[index], *node.output), (*strategy.inputs, *strategy.outputs))
            if name and layout is not None and layout.is_split
        ]
        if any(name in self._kept for name, _ in pairs):
            return False
        return any(layout in self._layouts[name] for name, layout in pairs)
