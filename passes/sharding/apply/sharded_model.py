"""Write a sharded model, in plain ONNX: a copy of each node per device, with slices, exchanges and sums between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import has_subgraphs, iterate_reads, iterate_subgraphs, rename_reads
from onnxplace.passes.sharding.apply.exchanges import ExchangeWriter, NodeOrigin, shard_weight
from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.rules.node_views import NodeView
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy, SubgraphSplit, make_local_node
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace


@dataclass(frozen=True)
class StateLayout:
    """The parts of a carried state."""

    output: str
    """The output of the original model that becomes the state."""
    layout: Layout
    inputs: tuple[str, ...]
    """Inputs that hold the parts, by device."""
    outputs: tuple[str, ...]
    """Outputs that become the parts, by device."""


@dataclass(frozen=True)
class WeightParts:
    """The parts of a weight, which together hold all its bytes."""

    layout: Layout
    names: tuple[str, ...]
    """Names of the parts, by device."""


@dataclass(frozen=True)
class ShardedModel:
    """A model whose nodes are parts of operators, with the device of each."""

    model: Model
    origins: tuple[NodeOrigin, ...]
    """Per node."""
    exchanges: Mapping[str, int]
    """Number of exchanges by kind: all-gather, all-to-all, reduce-scatter, all-reduce, halo."""
    split_states: Mapping[str, StateLayout]
    """Carried state (input name) -> how its parts lie on the devices."""
    weight_parts: Mapping[str, WeightParts]
    """Weight -> its parts, for weights that all devices hold parts of."""


def write_sharded_model(space: StrategySpace, choice: LayoutChoice, costs: ExchangeCosts) -> ShardedModel:
    """Return the model that computes the same on the devices of a group."""
    return ShardedModelWriter(space, choice, costs).write()


class ShardedModelWriter(ExchangeWriter):
    """Writes a copy of each node per device."""

    part_suffix = "shard"

    def __init__(self, space: StrategySpace, choice: LayoutChoice, costs: ExchangeCosts) -> None:
        super().__init__(space, costs)
        self.choice = choice
        # Most nodes have no subgraphs, and are not searched for what these read.
        self.nested = frozenset(index for index, node in enumerate(self.model.nodes) if has_subgraphs(node))
        for operands, strategy in zip(self.model.operands, choice.strategies):
            for name, layout in zip(operands, strategy.inputs):
                if layout is not None and layout.is_split:
                    self.wanted.setdefault(name, set()).add(layout._replace(valid=()))

    def write(self) -> ShardedModel:
        split_inputs = self.add_inputs()
        for index, strategy in enumerate(self.choice.strategies):
            self.add_node(index, strategy)
        return self.finish(split_inputs)

    def weight_parts(self) -> dict[str, WeightParts]:
        """Return, for weights that are only there in parts, one complete set of parts."""
        complete: dict[str, WeightParts] = {}
        for name, layout, _ in self.parts:
            if name not in self.facts.is_weight or name in self.weights or name in complete or layout.rows:
                continue
            # Parts that several devices have are under the first of them.
            holders = self.division.holders(layout, 0) if layout.is_split else self.devices
            keys = [(name, layout, device) for device in holders]
            if self.parts.keys() >= set(keys):
                complete[name] = WeightParts(layout, tuple(self.parts[key] for key in keys))
        return complete

    def add_inputs(self) -> dict[str, tuple[str, ...]]:
        """Make the inputs available on every device; return the parts of carried states."""
        split: dict[str, tuple[str, ...]] = {}
        for value in self.model.inputs:
            name = value.name
            if name not in self.model.states:
                for device in self.devices:
                    self.parts[name, REPLICATED, device] = name
                continue
            layout = self.choice.states[name]
            self.layouts[name] = layout
            parts = tuple(self.name(f"{name}/state{device}") for device in self.devices)
            for device, part in enumerate(parts):
                self.parts[name, layout, device] = part
            split[name] = parts
        return split

    def add_node(self, index: int, strategy: NodeStrategy) -> None:
        node = self.model.nodes[index]
        for name, layout in zip(node.output, strategy.outputs):
            if name and layout is not None:
                self.layouts[name] = layout
        if index in self.space.single:
            self.add_single(index)
            return
        for device in self.devices:
            self.add_copy(index, strategy, device)

    def add_single(self, index: int) -> None:
        """Add a node that runs once, on the first device, which sends its results to the others."""
        copy = deepcopy(self.model.nodes[index])
        copy.input[:] = [self.get(name, REPLICATED, 0) if name else "" for name in copy.input]
        self.rename_captured(copy, index, self.space.strategies[index][0], 0)
        self.add(copy, NodeOrigin(0, index))
        for name in filter(None, copy.output):
            for device in self.devices:
                self.parts[name, REPLICATED, device] = name

    def rename_captured(self, copy: NodeProto, index: int, strategy: NodeStrategy, device: int) -> None:
        own = len(copy.input)
        captured = zip(self.model.operands[index][own:], strategy.inputs[own:])
        names = {
            name: self.get(name, layout or REPLICATED, device)
            for name, layout in captured
            if name in self.layouts or name in self.facts.is_weight or name in self.model.input_names
        }
        if names:
            inputs = list(copy.input)
            rename_reads(copy, names)
            copy.input[:] = inputs  # they have their names already

    def add_copy(self, index: int, strategy: NodeStrategy, device: int) -> None:
        """Add a device's copy of a node."""
        node, view = self.model.nodes[index], self.space.views[index]
        if strategy.only_first >= 0 and device > 0:
            other = 1 - strategy.only_first
            self.parts[node.output[0], PARTIAL, device] = self.get(node.input[other], PARTIAL, device)
            return
        if strategy.shares_range:
            self.add_quantised_part(index, strategy, device)
            return
        copy = deepcopy(node)
        copy.name = self.name(f"{node.name}/{self.part_suffix}{device}")
        copy.input[:] = self.inputs(node, strategy, device)
        for graph, split in zip(iterate_subgraphs(copy), strategy.subgraphs):
            graph.CopyFrom(_SubgraphWriter(split, self.costs, copy.name, device).write_graph())
        self.rename_captured(copy, index, strategy, device)
        copy.output[:] = [
            self.name(self.part_name(name, layout, device)) if name and layout is not None else ""
            for name, layout in zip(node.output, strategy.outputs)
        ]
        if strategy.edit is not None and view is not None:
            self.edit(copy, view, strategy, device)
        self.add(copy, NodeOrigin(device, index))
        results = list(copy.output)
        if strategy.overrides_shape and view is not None:
            results = [self.override_shape(view, strategy, copy.output[0], device)]
        if strategy.weighs_means and view is not None:
            results = [self.weigh_mean(node, view, strategy, copy.output[0], device)]
        for name, layout, result in zip(node.output, strategy.outputs, results):
            if name and layout is not None:
                self.parts[name, layout, device] = result

    def inputs(self, node: NodeProto, strategy: NodeStrategy, device: int) -> list[str]:
        pairs = zip(node.input, strategy.inputs)
        return [self.get(name, layout or REPLICATED, device) if name else "" for name, layout in pairs]

    def edit(self, copy: NodeProto, view: NodeView, strategy: NodeStrategy, device: int) -> None:
        def override(name: str, length: int, index: int, entry: int) -> str:
            return self.override_entry(name, length, index, entry, f"{name}/for{device}", device)

        def zeros(name: str) -> str:
            position = list(copy.input).index(name)
            return self.zeros(name, self.facts.types[view.node.input[position]], f"{name}/zeros{device}", device)

        def make_node(op: str, inputs: Sequence[str], **attributes: Any) -> str:
            return self.exchange_node(op, inputs, f"{copy.name}/{op}", device, 0, **attributes)

        assert strategy.edit is not None
        add: dict[str, Callable[..., str]]
        add = {"make_ints": self.ints, "make_override": override, "make_zeros": zeros, "make_node": make_node}
        strategy.edit(make_local_node(self.division, view, strategy, device, copy, **add))

    def add_quantised_part(self, index: int, strategy: NodeStrategy, device: int) -> None:
        """Add the copy of a node that quantises its first input by the range of the whole.

        The range of the smallest and largest numbers of all parts is that of the whole, so scale and zero point are the
        same, to the bit.
        """
        node, (value, layout) = self.model.nodes[index], (self.model.nodes[index].input[0], strategy.inputs[0])
        assert layout is not None
        extremes = [self.extremes(value, layout, other) for other in self.devices]
        self.count("all-gather", value, "range")
        ends = self.concat(extremes, 0, f"{value}/range{device}", device, 0)
        scale, zero_point = (self.name(f"{node.name}/{kind}{device}") for kind in ("scale", "zero_point"))
        name = self.name(f"{node.name}/range{device}")
        proto = helper.make_node("DynamicQuantizeLinear", [ends], [f"{name}/unused", scale, zero_point], name=name)
        self.add(proto, NodeOrigin(device, -1))
        inputs = self.inputs(node, strategy, device)
        result = self.name(self.part_name(node.output[0], strategy.outputs[0] or REPLICATED, device))
        quantised = [inputs[0], scale, zero_point]
        if node.op_type == "DynamicQuantizeLinear":
            op, domain, operands = "QuantizeLinear", "", quantised
        else:
            moved_bytes = 5 * self.bytes(value, layout, device) // 4  # reads four bytes, writes one
            part = self.exchange_node(
                "QuantizeLinear", quantised, f"{node.name}/quantised{device}", device, moved_bytes
            )
            _, weight, weight_scale, *rest = inputs
            weight_zero_point, bias = (*rest, "", "")[:2]
            op, domain = "MatMulIntegerToFloat", "com.microsoft"
            operands = [part, weight, scale, weight_scale, zero_point, weight_zero_point, bias]
        name = self.name(f"{node.name}/{self.part_suffix}{device}")
        self.add(helper.make_node(op, operands, [result], name=name, domain=domain), NodeOrigin(device, index))
        for output, own, output_layout in zip(node.output, (result, scale, zero_point), strategy.outputs):
            if output and output_layout is not None:
                self.parts[output, output_layout, device] = own

    def extremes(self, value: str, layout: Layout, device: int) -> str:
        """Return the smallest and the largest number of a device's part."""
        key = f"{value}/extremes", layout, device
        if key not in self.parts:
            part, moved_bytes = self.get(value, layout, device), self.bytes(value, layout, device)
            ends = []
            for op in ("Min", "Max"):
                end = self.exchange_node(f"Reduce{op}", [part], f"{part}/{op}", device, moved_bytes)
                # Each range holds 0, which is that of an empty part, too.
                zero = self.constant("zero", np.zeros((), np.float32))
                ends.append(self.exchange_node(op, [end, zero], f"{part}/{op}", device, 0))
            self.parts[key] = self.concat(ends, 0, f"{part}/extremes", device, 0)
        return self.parts[key]

    def override_shape(self, view: NodeView, strategy: NodeStrategy, result: str, device: int) -> str:
        """Return the shape of the whole value, from that of a part."""
        layout = strategy.inputs[0]
        assert layout is not None
        axes = range(view.rank())[view.attribute("start", 0) : view.attribute("end", view.rank())]
        if layout.axis not in axes:
            return result
        index, size = axes.index(layout.axis), view.shape(0)[layout.axis]
        return self.override_entry(result, len(axes), index, size, f"{result}/whole", device)

    def weigh_mean(self, node: NodeProto, view: NodeView, strategy: NodeStrategy, result: str, device: int) -> str:
        """Return a part's mean times its share of the whole, which is a summand of the mean."""
        layout = next(layout for layout in strategy.inputs if layout is not None and layout.is_split)
        dtype = helper.tensor_dtype_to_np_dtype(self.facts.types[node.output[0]])
        weight = self.constant("mean", np.array(self.division.fraction(layout, device)).astype(dtype))
        size = self.facts.bytes(node.output[0])
        return self.exchange_node("Mul", [result, weight], f"{result}/weighted", device, 2 * size)

    # --- outputs ---

    def finish(self, split_inputs: Mapping[str, tuple[str, ...]]) -> ShardedModel:
        """Return the model of all nodes that its outputs need."""
        model = self.model
        outputs: list[ValueInfoProto] = []
        returned: dict[str, tuple[str, int]] = {}
        states: dict[str, str] = {}
        state_layouts: dict[str, StateLayout] = {}
        input_of = {output: name for name, output in model.states.items()}
        for output in model.outputs:
            source = model.sources.get(output.name, output.name)
            if output.name not in input_of:
                outputs.append(output)
                returned[source] = self.get(source, REPLICATED, 0), 0
                continue
            name = input_of[output.name]
            layout = self.choice.states[name]
            results = [self.name(f"{output.name}/state{device}") for device in self.devices]
            for device, (part, result) in enumerate(zip(split_inputs[name], results)):
                returned[result] = self.get(source, layout, device), device
                states[part] = result
                outputs.append(self.part_info(output, result, layout, source, device))
            state_layouts[name] = StateLayout(output.name, layout, split_inputs[name], tuple(results))
        inputs: list[ValueInfoProto] = []
        for value in model.inputs:
            if value.name in model.initializers and value.name not in split_inputs:
                self.weights.setdefault(value.name, model.initializers[value.name])
            if value.name not in split_inputs:
                inputs.append(value)
                continue
            layout = self.choice.states[value.name]
            inputs += [
                self.part_info(value, part, layout, value.name, device)
                for device, part in enumerate(split_inputs[value.name])
            ]
            self.cut_initial_state(value.name, layout, split_inputs[value.name])
        self.name_results(returned)
        nodes, origins, read = self.list_used(set(returned))
        read.update(value.name for value in inputs)
        sharded = replace(
            model,
            nodes=tuple(nodes),
            initializers=MappingProxyType({name: item for name, item in self.weights.items() if name in read}),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            states=MappingProxyType(states),
        )
        return ShardedModel(
            model=sharded,
            origins=tuple(origins),
            exchanges={kind: len(keys) for kind, keys in sorted(self.exchanges.items())},
            split_states=MappingProxyType(state_layouts),
            weight_parts=MappingProxyType(
                {name: parts for name, parts in self.weight_parts().items() if read.issuperset(parts.names)}
            ),
        )

    def cut_initial_state(self, name: str, layout: Layout, parts: Iterable[str]) -> None:
        """Make the parts of a state's default value the default values of its parts."""
        if (tensor := self.model.initializers.get(name)) is None:
            return
        for device, part in enumerate(parts):
            if layout.is_split:
                ranges = self.division.ranges(layout, tensor.dims[layout.axis], device)
                self.weights[part] = shard_weight(tensor, part, layout.axis, ranges, self.model.folder)
            else:
                self.weights[part] = TensorProto()
                self.weights[part].CopyFrom(tensor)
                self.weights[part].name = part

    def name_results(self, returned: Mapping[str, tuple[str, int]]) -> None:
        """Give returned values the names that the outputs have; copy those that are returned twice."""
        produced = {name for node in self.nodes for name in node.output}
        names: dict[str, str] = {}
        copies = []
        for name, (part, device) in returned.items():
            if part == name:
                continue
            if part in produced and part not in names and part not in returned:
                names[part] = name
            else:
                copies.append((name, part, device))
        for node, origin in zip(self.nodes, self.origins):
            if not names.keys().isdisjoint(node.output):
                node.output[:] = [names.get(item, item) for item in node.output]
            if not names.keys().isdisjoint(self.reads(node, origin)):
                rename_reads(node, names)
        for name, part, device in copies:
            node = helper.make_node("Identity", [names.get(part, part)], [name], name=self.name(f"{name}/copy"))
            self.add(node, NodeOrigin(device, -1))

    def reads(self, node: NodeProto, origin: NodeOrigin) -> Iterable[str]:
        """Return what a node reads; only nodes with subgraphs are searched."""
        return iterate_reads(node) if origin.source in self.nested else node.input

    def list_used(self, needed: set[str]) -> tuple[list[NodeProto], list[NodeOrigin], set[str]]:
        """Return the nodes that the needed values depend on, with their origins, and all values that are needed."""
        used = []
        for node, origin in zip(reversed(self.nodes), reversed(self.origins)):
            if not needed.isdisjoint(node.output):
                used.append((node, origin))
                needed.update(self.reads(node, origin))
                needed.discard("")
        return [node for node, _ in reversed(used)], [origin for _, origin in reversed(used)], needed

    def part_info(self, value: ValueInfoProto, name: str, layout: Layout, source: str, device: int) -> ValueInfoProto:
        """Return the declaration of a part of an input or output."""
        result = deepcopy(value)
        result.name = name
        shape = result.type.tensor_type.shape
        for axis, entry in enumerate(shape.dim):
            if value.name in self.model.states and entry.WhichOneof("value") is None:
                entry.dim_param = f"{value.name}.{axis}"  # one size for all parts, under the name that users know
        if layout.is_split and len(shape.dim) > layout.axis:
            size = self.division.local_size(layout, self.facts.shapes[source][layout.axis], device)
            shape.dim[layout.axis].Clear()
            shape.dim[layout.axis].dim_value = size
        return result


class _SubgraphWriter(ShardedModelWriter):
    """Writes a device's part of a subgraph; its names begin with that of the node, so that they hide no others."""

    def __init__(self, split: SubgraphSplit, costs: ExchangeCosts, prefix: str, device: int) -> None:
        choice = LayoutChoice(split.strategies, {}, seconds=0.0, lower_bound_seconds=0.0, weight_bytes=0)
        super().__init__(split.space, choice, costs)
        self.split, self.prefix, self.device = split, prefix, device
        self.devices = range(device, device + 1)
        for name, layout in split.inputs.items():
            self.layouts[name] = layout
            self.parts[name, layout, device] = name

    def name(self, base: str) -> str:
        return super().name(f"{self.prefix}/{base}")

    def constant(self, base: str, array: NDArray[Any]) -> str:
        return super().constant(f"{self.prefix}/{base}", array)

    def weight_part(self, name: str, layout: Layout, device: int) -> str:
        """Return a part of a weight of the subgraph; those that it captures are cut outside."""
        if name in self.split.inputs:
            return self.parts[name, layout, device]
        return super().weight_part(name, layout, device)

    def write_graph(self) -> GraphProto:
        """Return the part of the subgraph, which reads captured values under their own names."""
        for index, strategy in enumerate(self.split.strategies):
            self.add_node(index, strategy)
        graph, results = self.split.graph, list[str]()
        for value, layout in zip(graph.output, self.split.outputs):
            result = self.get(value.name, layout, self.device)
            # A subgraph returns values that it computes, each once.
            if result in results or result in self.weights or result in self.split.inputs:
                result = self.exchange_node("Identity", [result], f"{value.name}/result", self.device, 0)
            results.append(result)
        assert not self.exchanges, f"devices exchange {self.exchanges} inside {self.prefix!r}"
        nodes, _, read = self.list_used(set(results))
        layouts = [self.split.inputs[value.name] for value in graph.input]
        inputs, outputs = (
            [self.part_info(value, name, layout, value.name, self.device) for value, name, layout in values]
            for values in (
                zip(graph.input, (value.name for value in graph.input), layouts),
                zip(graph.output, results, self.split.outputs),
            )
        )
        weights = [tensor for name, tensor in self.weights.items() if name in read]
        return helper.make_graph(nodes, graph.name, inputs, outputs, weights)
