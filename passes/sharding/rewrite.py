"""Write a sharded model: a copy of each node per device, with slices, exchanges and sums between them.

The result is plain ONNX. Exchanges need no operators of their own: a device that reads another device's value receives
it, as any other value that crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxplace.model import Model, captured_names, iterate_reads, iterate_subgraphs, rename_reads
from onnxplace.passes.sharding.choice import Choice
from onnxplace.passes.sharding.exchange_costs import ExchangeCosts
from onnxplace.passes.sharding.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.shard_weights import shard_weight
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy
from onnxplace.passes.sharding.windows import ROW_AXIS
from onnxplace.passes.sharding.work_costs import local_shapes

_Part = tuple[str, Layout, int]
"""Value, layout, device."""


@dataclass(frozen=True)
class NodeOrigin:
    """Where a node of a sharded model comes from."""

    device: int
    """Position in the group."""
    source: int
    """Index of the original node, or -1 for an exchange."""
    moved_bytes: int = 0
    """Bytes that an exchange node reads and writes."""


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
    """By device."""


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


def write_sharded_model(space: StrategySpace, choice: Choice, costs: ExchangeCosts) -> ShardedModel:
    """Return the model that computes the same on the devices of a group."""
    return _Writer(space, choice, costs).write()


class _Writer:
    def __init__(self, space: StrategySpace, choice: Choice, costs: ExchangeCosts) -> None:
        self._space, self._choice, self._costs = space, choice, costs
        self._facts, self._division = space.facts, space.division
        self._model = space.facts.model
        self._devices = range(space.division.count)
        self._nodes: list[NodeProto] = []
        self._origins: list[NodeOrigin] = []
        self._weights: dict[str, TensorProto] = {}
        self._parts: dict[_Part, str] = {}
        self._layouts: dict[str, Layout] = {}
        self._vectors: dict[tuple[int, ...], str] = {}
        # Names that subgraphs capture; most nodes have none.
        self._captured = {
            index: sorted({name for graph in iterate_subgraphs(node) for name in captured_names(graph)})
            for index, node in enumerate(self._model.nodes)
            if any(True for _ in iterate_subgraphs(node))
        }
        self._slices: dict[tuple[str, int, int, int], str] = {}
        self._halos: dict[tuple[str, tuple[int, int], int], str] = {}
        self._exchanges: dict[str, set[object]] = {}
        self._taken = set(self._model.initializers) | self._model.input_names
        self._taken.update(name for node in self._model.nodes for name in (node.name, *node.output))

    # --- names, constants and nodes ---

    def _name(self, base: str) -> str:
        """Return a name that is not taken yet."""
        name, number = base, 1
        while name in self._taken:
            name, number = f"{base}.{number}", number + 1
        self._taken.add(name)
        return name

    def _constant(self, base: str, array: NDArray[Any]) -> str:
        """Return the name of a small constant; equal ones are stored once."""
        array = np.asarray(array)
        key = f"{base}/{array.dtype.name}/" + "_".join(str(item) for item in array.reshape(-1).tolist())
        if key not in self._weights:
            self._weights[key] = numpy_helper.from_array(array, key)
            self._taken.add(key)
        return key

    def _ints(self, values: Sequence[int]) -> str:
        key = tuple(values)
        if key not in self._vectors:
            self._vectors[key] = self._constant("shard", np.array([int(value) for value in values], np.int64))
        return self._vectors[key]

    def _add(self, proto: NodeProto, origin: NodeOrigin) -> None:
        self._nodes.append(proto)
        self._origins.append(origin)

    def _exchange_node(
        self, op: str, inputs: Sequence[str], result: str, device: int, moved_bytes: int, **attributes: Any
    ) -> str:
        """Add a node of an exchange and return its result."""
        name = self._name(result)
        node = helper.make_node(op, list(inputs), [name], name=name, **attributes)
        self._add(node, NodeOrigin(device, -1, moved_bytes))
        return name

    # --- parts of values ---

    def _bytes(self, name: str, layout: Layout, device: int) -> int:
        return int(self._facts.bytes(name) * self._division.fraction(layout, device))

    def _part_name(self, name: str, layout: Layout, device: int) -> str:
        kind = "part" if layout.is_split else "sum" if layout == PARTIAL else "copy"
        return f"{name}/{kind}{device}"

    def get(self, name: str, layout: Layout, device: int) -> str:
        """Return the name of a device's part of a value, in a layout; adds the nodes that make it."""
        if name in self._facts.is_weight:
            return self._weight_part(name, layout, device)
        part = name, layout, device
        if part not in self._parts:
            self._parts[part] = self._convert(name, layout, device)
        return self._parts[part]

    def _weight_part(self, name: str, layout: Layout, device: int) -> str:
        tensor = self._model.initializers[name]
        if layout == REPLICATED:
            self._weights.setdefault(name, tensor)
            return name
        key = (name, layout, device)
        if key not in self._parts:
            part = self._name(f"{name}/part{device}")
            ranges = self._division.ranges(layout, tensor.dims[layout.axis], device)
            self._weights[part] = shard_weight(tensor, part, layout.axis, ranges, self._model.folder)
            self._parts[key] = part
        return self._parts[key]

    def _convert(self, name: str, layout: Layout, device: int) -> str:
        """Add the nodes that make a device's part from the layouts that there are."""
        source = self._layouts.get(name, REPLICATED)
        has_copy = (name, REPLICATED, device) in self._parts
        if layout.is_split and (source == REPLICATED or has_copy):
            return self._slice_copy(name, layout, device)
        if layout == PARTIAL:
            return self._as_summand(name, device)
        if layout == REPLICATED and source.is_split:
            return self._gather(name, source, device)
        if layout == REPLICATED:
            return self._all_reduce(name, device)
        if source == PARTIAL:
            return self._reduce_scatter(name, layout, device)
        if source.axis == layout.axis:
            return self._slice_copy(name, layout, device)
        return self._all_to_all(name, source, layout, device)

    def _count(self, kind: str, *key: object) -> None:
        self._exchanges.setdefault(kind, set()).add(key)

    def _slice(self, value: str, axis: int, low: int, high: int, device: int, moved_bytes: int) -> str:
        """Return a range of a part along an axis."""
        key = value, axis, low, high
        if key not in self._slices:
            result = f"{value}/{low}:{high}"
            if self._facts.opset < 10:
                made = self._exchange_node(
                    "Slice", [value], result, device, moved_bytes, starts=[low], ends=[high], axes=[axis]
                )
            else:
                inputs = [value, self._ints([low]), self._ints([high]), self._ints([axis])]
                made = self._exchange_node("Slice", inputs, result, device, moved_bytes)
            self._slices[key] = made
        return self._slices[key]

    def _ranges_of(
        self, value: str, axis: int, size: int, ranges: Sequence[tuple[int, int]], device: int, moved_bytes: int
    ) -> str:
        """Return several ranges of a part, one after the other."""
        pieces = []
        for low, high in ranges:
            is_whole = (low, high) == (0, size)
            pieces.append(value if is_whole else self._slice(value, axis, low, high, device, 2 * moved_bytes))
        return self._concat(pieces, axis, f"{value}/cut", device, 2 * moved_bytes)

    def _concat(self, pieces: Sequence[str], axis: int, result: str, device: int, moved_bytes: int) -> str:
        if len(pieces) == 1:
            return pieces[0]
        return self._exchange_node("Concat", pieces, result, device, moved_bytes, axis=axis)

    def _add_up(self, pieces: Sequence[str], result: str, device: int, moved_bytes: int) -> str:
        """Return the sum of pieces, added from the first device's to the last one's: the same on every device."""
        total = pieces[0]
        for piece in pieces[1:]:
            total = self._exchange_node("Add", [total, piece], result, device, moved_bytes)
        return total

    def _slice_copy(self, name: str, layout: Layout, device: int) -> str:
        size = self._facts.shapes[name][layout.axis]
        ranges = self._division.ranges(layout, size, device)
        copy = self.get(name, REPLICATED, device)
        return self._ranges_of(copy, layout.axis, size, ranges, device, self._bytes(name, layout, device))

    def _as_summand(self, name: str, device: int) -> str:
        """Return the value itself on the first device, zeros on the others."""
        copy = self.get(name, REPLICATED, device)
        if device == 0:
            return copy
        kind = self._facts.types[name]
        zero = self._constant("zero", np.zeros((), helper.tensor_dtype_to_np_dtype(kind)))
        condition = self._constant("false", np.array(False))
        inputs = [condition, copy, zero]
        return self._exchange_node(
            "Where", inputs, self._part_name(name, PARTIAL, device), device, self._facts.bytes(name)
        )

    def _gather(self, name: str, source: Layout, device: int) -> str:
        self._count("all-gather", name)
        pieces = [self.get(name, source, other) for other in self._devices]
        return self._merge(name, source, pieces, self._facts.shapes[name], device, self._facts.bytes(name))

    def _merge(
        self, name: str, source: Layout, pieces: Sequence[str], shape: Sequence[int], device: int, size_bytes: int
    ) -> str:
        """Return the parts of a value, one per device, put together along their split axis."""
        axis, ordered = source.axis, []
        result = self._part_name(name, REPLICATED, device)
        if source.outer == 1:
            return self._concat(pieces, axis, result, device, 2 * size_bytes)
        for row in range(source.outer):
            for other, piece in zip(self._devices, pieces):
                rows = self._division.local_size(source, shape[axis], other) // source.outer
                share = size_bytes // (source.outer * len(pieces))
                ordered.append(self._slice(piece, axis, row * rows, (row + 1) * rows, device, 2 * share))
        return self._concat(ordered, axis, result, device, 2 * size_bytes)

    def _all_reduce(self, name: str, device: int) -> str:
        self._count("all-reduce", name)
        size = self._facts.bytes(name)
        if self._costs.two_step_sum_seconds(size) < self._costs.direct_sum_seconds(size):
            layout = self._scatter_layout(name)
            if layout is not None:
                pieces = [self.get(name, layout, other) for other in self._devices]
                return self._merge(name, layout, pieces, self._facts.shapes[name], device, size)
        pieces = [self.get(name, PARTIAL, other) for other in self._devices]
        return self._add_up(pieces, self._part_name(name, REPLICATED, device), device, 3 * size)

    def _scatter_layout(self, name: str) -> Layout | None:
        """Return the layout in which the devices share the sum of a value; None if no axis can be split."""
        fixed = self._facts.fixed.get(name, ())
        for axis, size in enumerate(self._facts.shapes[name]):
            if fixed[axis] and (layout := self._division.split(axis, size)) is not None:
                return layout
        return None

    def _reduce_scatter(self, name: str, layout: Layout, device: int) -> str:
        self._count("reduce-scatter", name)
        size = self._facts.shapes[name][layout.axis]
        ranges, part_bytes = self._division.ranges(layout, size, device), self._bytes(name, layout, device)
        pieces = [
            self._ranges_of(self.get(name, PARTIAL, other), layout.axis, size, ranges, other, part_bytes)
            for other in self._devices
        ]
        return self._add_up(pieces, self._part_name(name, layout, device), device, 3 * part_bytes)

    def _all_to_all(self, name: str, source: Layout, layout: Layout, device: int) -> str:
        """Return a device's part along another axis: each device sends it its share of that."""
        self._count("all-to-all", name)
        shape = self._facts.shapes[name]
        size = shape[layout.axis]
        ranges, part_bytes = self._division.ranges(layout, size, device), self._bytes(name, layout, device)
        pieces = [
            self._ranges_of(
                self.get(name, source, other), layout.axis, size, ranges, other, part_bytes // len(self._devices)
            )
            for other in self._devices
        ]
        return self._merge(name, source, pieces, shape, device, part_bytes)

    # --- nodes ---

    def write(self) -> ShardedModel:
        split_inputs = self._add_inputs()
        for index, strategy in enumerate(self._choice.strategies):
            self._add_node(index, strategy)
        return self._finish(split_inputs)

    def _weight_parts(self) -> dict[str, WeightParts]:
        """Return, for weights that are only there in parts, one complete set of parts."""
        complete: dict[str, WeightParts] = {}
        for name, layout, _ in self._parts:
            if name not in self._facts.is_weight or name in self._weights or name in complete:
                continue
            names = [self._parts.get((name, layout, device)) for device in self._devices]
            present = [part for part in names if part is not None]
            if len(present) == len(names):
                complete[name] = WeightParts(layout, tuple(present))
        return complete

    def _add_inputs(self) -> dict[str, tuple[str, ...]]:
        """Make the inputs available on every device; return the parts of carried states."""
        split: dict[str, tuple[str, ...]] = {}
        for value in self._model.inputs:
            name = value.name
            if name not in self._model.states:
                for device in self._devices:
                    self._parts[name, REPLICATED, device] = name
                continue
            layout = self._choice.states[name]
            self._layouts[name] = layout
            parts = tuple(self._name(f"{name}/state{device}") for device in self._devices)
            for device, part in enumerate(parts):
                self._parts[name, layout, device] = part
            split[name] = parts
        return split

    def _add_node(self, index: int, strategy: Strategy) -> None:
        node = self._model.nodes[index]
        for name, layout in zip(node.output, strategy.outputs):
            if name and layout is not None:
                self._layouts[name] = layout
        if index in self._space.single:
            self._add_single(index)
            return
        for device in self._devices:
            self._add_copy(index, strategy, device)

    def _add_single(self, index: int) -> None:
        """Add a node that runs once, on the first device, which sends its results to the others."""
        copy = NodeProto()
        copy.CopyFrom(self._model.nodes[index])
        copy.input[:] = [self.get(name, REPLICATED, 0) if name else "" for name in copy.input]
        self._rename_captured(copy, index, 0)
        self._add(copy, NodeOrigin(0, index))
        for name in filter(None, copy.output):
            for device in self._devices:
                self._parts[name, REPLICATED, device] = name

    def _rename_captured(self, copy: NodeProto, index: int, device: int) -> None:
        if index in self._captured:
            names = {name: self.get(name, REPLICATED, device) for name in self._captured[index] if self._is_known(name)}
            _rename_in_subgraphs(copy, names)

    def _is_known(self, name: str) -> bool:
        return name in self._layouts or name in self._facts.is_weight or name in self._model.input_names

    def _add_copy(self, index: int, strategy: Strategy, device: int) -> None:
        """Add a device's copy of a node."""
        node, view = self._model.nodes[index], self._space.views[index]
        if strategy.only_first >= 0 and device > 0:
            other = 1 - strategy.only_first
            self._parts[node.output[0], PARTIAL, device] = self.get(node.input[other], PARTIAL, device)
            return
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = self._name(f"{node.name}/shard{device}")
        copy.input[:] = [self._input(node, strategy, position, device) for position in range(len(node.input))]
        self._rename_captured(copy, index, device)
        copy.output[:] = [
            self._name(self._part_name(name, layout, device)) if name and layout is not None else ""
            for name, layout in zip(node.output, strategy.outputs)
        ]
        if strategy.edit is not None and view is not None:
            self._edit(copy, view, strategy, device)
        self._add(copy, NodeOrigin(device, index))
        results = list(copy.output)
        if strategy.overrides_shape and view is not None:
            results = [self._override_shape(view, strategy, copy.output[0], device)]
        if strategy.weighs_means and view is not None:
            results = [self._weigh_mean(node, view, strategy, copy.output[0], device)]
        for name, layout, result in zip(node.output, strategy.outputs, results):
            if name and layout is not None:
                self._parts[name, layout, device] = result

    def _input(self, node: NodeProto, strategy: Strategy, position: int, device: int) -> str:
        name, layout = node.input[position], strategy.inputs[position]
        if not name:
            return ""
        if strategy.window is not None and strategy.window.input == position:
            return self._window(name, layout or REPLICATED, strategy.window.rows[device], device)
        return self.get(name, layout or REPLICATED, device)

    def _edit(self, copy: NodeProto, view: NodeView, strategy: Strategy, device: int) -> None:
        inputs, outputs = local_shapes(self._space, view, strategy, device)

        def override(name: str, length: int, index: int, entry: int) -> str:
            mask, values = np.zeros(length, bool), np.zeros(length, np.int64)
            mask[index], values[index] = True, entry
            inputs = [self._constant("mask", mask), self._ints(values.tolist()), name]
            return self._exchange_node("Where", inputs, f"{name}/for{device}", device, 8 * length)

        assert strategy.edit is not None
        strategy.edit(
            LocalNode(
                proto=copy,
                view=view,
                device=device,
                inputs=inputs,
                outputs=outputs,
                layouts=strategy.outputs,
                make_ints=self._ints,
                make_override=override,
            )
        )

    def _override_shape(self, view: NodeView, strategy: Strategy, result: str, device: int) -> str:
        """Return the shape of the whole value, from that of a part."""
        layout = strategy.inputs[0]
        assert layout is not None
        rank = view.rank()
        start, end = (
            min(max(int(item) + rank if item < 0 else int(item), 0), rank)
            for item in (view.attribute("start", 0), view.attribute("end", rank))
        )
        if not start <= layout.axis < end:
            return result
        mask, values = np.zeros(end - start, bool), np.zeros(end - start, np.int64)
        mask[layout.axis - start], values[layout.axis - start] = True, view.shape(0)[layout.axis]
        inputs = [self._constant("mask", mask), self._ints(values.tolist()), result]
        return self._exchange_node("Where", inputs, f"{result}/whole", device, 8 * len(values))

    def _weigh_mean(self, node: NodeProto, view: NodeView, strategy: Strategy, result: str, device: int) -> str:
        """Return a part's mean times its share of the whole, which is a summand of the mean."""
        layout = next(layout for layout in strategy.inputs if layout is not None and layout.is_split)
        dtype = helper.tensor_dtype_to_np_dtype(self._facts.types[node.output[0]])
        weight = self._constant("mean", np.array(self._division.fraction(layout, device)).astype(dtype))
        size = self._facts.bytes(node.output[0])
        return self._exchange_node("Mul", [result, weight], f"{result}/weighted", device, 2 * size)

    def _window(self, name: str, layout: Layout, rows: tuple[int, int], device: int) -> str:
        """Return the rows of a value that a device's windows cover, with those that other devices have."""
        key = name, rows, device
        if key in self._halos:
            return self._halos[key]
        shape = self._facts.shapes[name]
        row_bytes = self._facts.bytes(name) // max(shape[ROW_AXIS], 1)
        low, high = rows
        if not layout.is_split:
            copy, size = self.get(name, REPLICATED, device), shape[ROW_AXIS]
            result = (
                copy
                if rows == (0, size)
                else self._slice(copy, ROW_AXIS, low, high, device, 2 * row_bytes * (high - low))
            )
        else:
            pieces = self._window_pieces(name, layout, rows, device, row_bytes)
            result = self._concat(pieces, ROW_AXIS, f"{name}/rows{device}", device, 2 * row_bytes * (high - low))
        self._halos[key] = result
        return result

    def _window_pieces(
        self, name: str, layout: Layout, rows: tuple[int, int], device: int, row_bytes: int
    ) -> list[str]:
        """Return the pieces of a window, from the devices that have them."""
        size, pieces = self._facts.shapes[name][ROW_AXIS], []
        for other in self._devices:
            own = self._division.ranges(layout, size, other)[0]
            low, high = max(rows[0], own[0]), min(rows[1], own[1])
            if low >= high:
                continue
            part = self.get(name, layout, other)
            if (low, high) != own:
                moved = 2 * row_bytes * (high - low)
                part = self._slice(part, ROW_AXIS, low - own[0], high - own[0], other, moved)
            if other != device:
                self._count("halo", name, rows)
            pieces.append(part)
        return pieces

    # --- outputs ---

    def _finish(self, split_inputs: Mapping[str, tuple[str, ...]]) -> ShardedModel:
        """Return the model of all nodes that its outputs need."""
        model = self._model
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
            layout = self._choice.states[name]
            results = [self._name(f"{output.name}/state{device}") for device in self._devices]
            for device, (part, result) in enumerate(zip(split_inputs[name], results)):
                returned[result] = self.get(source, layout, device), device
                states[part] = result
                outputs.append(self._part_info(output, result, layout, source, device))
            state_layouts[name] = StateLayout(output.name, layout, split_inputs[name], tuple(results))
        inputs: list[ValueInfoProto] = []
        for value in model.inputs:
            if value.name in model.initializers:
                self._weights.setdefault(value.name, model.initializers[value.name])
            if value.name not in split_inputs:
                inputs.append(value)
                continue
            layout = self._choice.states[value.name]
            inputs += [
                self._part_info(value, part, layout, value.name, device)
                for device, part in enumerate(split_inputs[value.name])
            ]
        self._name_results(returned)
        nodes, origins, read = self._list_used(set(returned))
        read.update(value.name for value in inputs)
        weight_parts = self._weight_parts()
        sharded = replace(
            model,
            nodes=tuple(nodes),
            initializers=MappingProxyType({name: item for name, item in self._weights.items() if name in read}),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            states=MappingProxyType(states),
        )
        exchanges = {kind: len(keys) for kind, keys in sorted(self._exchanges.items())}
        return ShardedModel(
            model=sharded,
            origins=tuple(origins),
            exchanges=exchanges,
            split_states=MappingProxyType(state_layouts),
            weight_parts=MappingProxyType(
                {name: parts for name, parts in weight_parts.items() if read.issuperset(parts.names)}
            ),
        )

    def _name_results(self, returned: Mapping[str, tuple[str, int]]) -> None:
        """Give returned values the names that the outputs have; copy those that are returned twice."""
        produced = {name for node in self._nodes for name in node.output}
        names: dict[str, str] = {}
        copies = []
        for name, (part, device) in returned.items():
            if part == name:
                continue
            if part in produced and part not in names and part not in returned:
                names[part] = name
            else:
                copies.append((name, part, device))
        for node, origin in zip(self._nodes, self._origins):
            if not names.keys().isdisjoint(node.output):
                node.output[:] = [names.get(item, item) for item in node.output]
            if not names.keys().isdisjoint(self._reads(node, origin)):
                rename_reads(node, names)
        for name, part, device in copies:
            node = helper.make_node("Identity", [names.get(part, part)], [name], name=self._name(f"{name}/copy"))
            self._add(node, NodeOrigin(device, -1))

    def _reads(self, node: NodeProto, origin: NodeOrigin) -> Iterable[str]:
        """Return what a node reads; only nodes with subgraphs are searched."""
        return iterate_reads(node) if origin.source in self._captured else node.input

    def _list_used(self, needed: set[str]) -> tuple[list[NodeProto], list[NodeOrigin], set[str]]:
        """Return the nodes that the needed values depend on, with their origins, and all values that are needed."""
        used = []
        for node, origin in zip(reversed(self._nodes), reversed(self._origins)):
            if not needed.isdisjoint(node.output):
                used.append((node, origin))
                needed.update(self._reads(node, origin))
                needed.discard("")
        return [node for node, _ in reversed(used)], [origin for _, origin in reversed(used)], needed

    def _part_info(self, value: ValueInfoProto, name: str, layout: Layout, source: str, device: int) -> ValueInfoProto:
        """Return the declaration of a part of an input or output."""
        result = ValueInfoProto()
        result.CopyFrom(value)
        result.name = name
        shape = result.type.tensor_type.shape
        if layout.is_split and len(shape.dim) > layout.axis:
            size = self._division.local_size(layout, self._facts.shapes[source][layout.axis], device)
            shape.dim[layout.axis].Clear()
            shape.dim[layout.axis].dim_value = size
        return result


def _rename_in_subgraphs(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename what the subgraphs of a node capture; its own inputs keep their names."""
    own = list(node.input)
    rename_reads(node, names)
    node.input[:] = own
