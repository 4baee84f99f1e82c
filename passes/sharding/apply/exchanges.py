"""Parts of values in a sharded model: names, constants, parts of weights, and the nodes that change layouts.

Exchanges need no special operators: a device that reads another device's value receives it, as any other value
that crosses. So each is written as Slice, Concat and Add on the device that needs the result:

- all-gather: Concat of the parts of all devices;
- all-reduce: Sum of all summands, or, where that moves less, reduce-scatter and then Concat;
- reduce-scatter: each device sends a slice of its summand to each other one, which adds them up;
- all-to-all: each device sends a slice of its part along the new axis, and receivers concatenate along the old one;
- halo: rows of the neighbours, next to the own ones.

Between hosts, parts and sums may cross once, where that is shorter: the device at the same place of the other host
passes them on to its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxplace.model.tensors import (
    embed_tensor,
    make_reference,
    make_tensor_part,
    packed_size,
    read_external_range,
    read_tensor_bytes,
)
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Layout
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace

_SUMMED_TYPES = frozenset(("FLOAT", "FLOAT16", "DOUBLE"))
_PACKED_TYPES = frozenset(("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2"))

Part = tuple[str, Layout, int]
"""Value, layout, device."""


def shard_weight(
    tensor: TensorProto, name: str, axis: int, ranges: Sequence[tuple[int, int]], folder: Path | None
) -> TensorProto:
    """Return some ranges of a weight along an axis.

    External data stays in its file: a contiguous range is referred to by offset and length, and other parts are read
    when the bundle is written. Parts of weights inside the model are copied.

    Args:
        tensor: The weight.
        name: Name of the part.
        axis: The split axis.
        ranges: [low, high) along it.
        folder: Folder of external data.
    """
    dims = list(tensor.dims)
    dims[axis] = sum(high - low for low, high in ranges)
    rows, size = math.prod(tensor.dims[:axis]), tensor.dims[axis]
    inner = tuple(tensor.dims[axis + 1 :])
    is_external = tensor.data_location == TensorProto.EXTERNAL
    is_packed = TensorProto.DataType.Name(tensor.data_type) in _PACKED_TYPES
    if is_external and not is_packed:
        if rows != 1 or len(ranges) != 1:
            return make_tensor_part(tensor, name, axis, ranges)
        # Along the first axis, one range is contiguous in the file, which may be absent: nothing is read.
        location = next(entry.value for entry in tensor.external_data if entry.key == "location")
        start = read_external_range(tensor)[0] + packed_size(tensor.data_type, (ranges[0][0], *inner))
        return make_reference(name, tensor.data_type, dims, location, start, packed_size(tensor.data_type, dims))
    # Elements of less than a byte, and strings, have no offsets in bytes.
    if is_packed or tensor.data_type == TensorProto.STRING:
        array = numpy_helper.to_array(embed_tensor(tensor, folder))
        pieces = [array.take(range(low, high), axis) for low, high in ranges]
        return numpy_helper.from_array(np.concatenate(pieces, axis), name)
    item = packed_size(tensor.data_type, inner)
    data = np.frombuffer(b"".join(read_tensor_bytes(tensor, folder)), np.uint8).reshape(rows, size * item)
    parts = [data[:, low * item : high * item] for low, high in ranges]
    raw = np.concatenate(parts, axis=1).tobytes()
    return TensorProto(name=name, data_type=tensor.data_type, dims=dims, raw_data=raw)


def list_slice_arguments(
    opset: int, value: str, axis: int, low: int, high: int, ints: Callable[[Sequence[int]], str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the inputs and attributes of a Slice; `ints` returns the name of a constant vector."""
    if opset < 10:
        return [value], {"starts": [low], "ends": [high], "axes": [axis]}
    return [value, ints([low]), ints([high]), ints([axis])], {}


@dataclass(frozen=True)
class NodeOrigin:
    """Where a node of a sharded model comes from."""

    device: int
    """Position in the group."""
    source: int
    """Index of the original node, or -1 for an exchange."""
    moved_bytes: int = 0
    """Bytes that an exchange node reads and writes."""


class ExchangeWriter:
    """Collects the nodes of a sharded model, and makes parts of values in the layouts that are asked for."""

    def __init__(self, space: StrategySpace, costs: ExchangeCosts) -> None:
        self.space, self.costs = space, costs
        self.facts, self.division = space.facts, space.division
        self.model = space.facts.model
        self.devices = range(space.division.count)
        self.nodes: list[NodeProto] = []
        self.origins: list[NodeOrigin] = []
        self.weights: dict[str, TensorProto] = {}
        # What was made before is used again: a value is exchanged once for each layout and device.
        self.parts: dict[Part, str] = {}
        self.layouts: dict[str, Layout] = {}
        self.vectors: dict[tuple[int, ...], str] = {}
        self.slices: dict[tuple[str, int, int, int], str] = {}
        self.pieces: dict[tuple[str, Layout, Layout], list[list[str]]] = {}
        self.wanted: dict[str, set[Layout]] = {}
        """Value -> split layouts in which nodes read it, with valid rows alone."""
        self.sent: dict[str, str] = {}
        self.relayed: dict[tuple[str, int], str] = {}
        self.exchanges: dict[str, set[object]] = {}
        self.taken = set(self.model.initializers) | self.model.input_names
        self.taken.update(name for node in self.model.nodes for name in (node.name, *node.output))

    # --- names, constants and nodes ---

    def name(self, base: str) -> str:
        """Return a name that is not taken yet."""
        name, number = base, 1
        while name in self.taken:
            name, number = f"{base}.{number}", number + 1
        self.taken.add(name)
        return name

    def constant(self, base: str, array: NDArray[Any]) -> str:
        """Return the name of a small constant; equal ones are stored once."""
        array = np.asarray(array)
        key = f"{base}/{array.dtype.name}/" + "_".join(str(item) for item in array.reshape(-1).tolist())
        if key not in self.weights:
            self.weights[key] = numpy_helper.from_array(array, key)
            self.taken.add(key)
        return key

    def ints(self, values: Sequence[int]) -> str:
        key = tuple(values)
        if key not in self.vectors:
            self.vectors[key] = self.constant("shard", np.array([int(value) for value in values], np.int64))
        return self.vectors[key]

    def add(self, proto: NodeProto, origin: NodeOrigin) -> None:
        self.nodes.append(proto)
        self.origins.append(origin)

    def exchange_node(
        self, op: str, inputs: Sequence[str], result: str, device: int, moved_bytes: int, **attributes: Any
    ) -> str:
        """Add a node of an exchange and return its result."""
        name = self.name(result)
        node = helper.make_node(op, list(inputs), [name], name=name, **attributes)
        self.add(node, NodeOrigin(device, -1, moved_bytes))
        return name

    def override_entry(self, vector: str, length: int, index: int, entry: int, result: str, device: int) -> str:
        """Return a vector of integers with another entry at one index."""
        mask, values = np.zeros(length, bool), np.zeros(length, np.int64)
        mask[index], values[index] = True, entry
        inputs = [self.constant("mask", mask), self.ints(values.tolist()), vector]
        return self.exchange_node("Where", inputs, result, device, 8 * length)

    # --- parts of values ---

    def bytes(self, name: str, layout: Layout, device: int) -> int:
        return int(self.facts.bytes(name) * self.division.fraction(layout, device))

    def part_name(self, name: str, layout: Layout, device: int) -> str:
        kind = "part" if layout.is_split else "sum" if layout == PARTIAL else "copy"
        return f"{name}/{kind}{device}"

    def get(self, name: str, layout: Layout, device: int) -> str:
        """Return the name of a device's part of a value, in a layout; adds the nodes that make it."""
        if name in self.facts.is_weight:
            return self.weight_part(name, layout, device)
        part = name, layout, device
        if part not in self.parts:
            self.parts[part] = self.convert(name, layout, device)
        return self.parts[part]

    def get_from(self, name: str, layout: Layout, source: int, device: int) -> str:
        """Return the part of another device for a node on `device`.

        A carried state has readers on its own device only, so that a copy of it is sent.
        """
        part = self.get(name, layout, source)
        if source == device or name not in self.model.states:
            return part
        if part not in self.sent:
            moved_bytes = 2 * self.bytes(name, layout, source)
            self.sent[part] = self.exchange_node("Identity", [part], f"{part}/sent", source, moved_bytes)
        return self.sent[part]

    def weight_part(self, name: str, layout: Layout, device: int) -> str:
        tensor = self.model.initializers[name]
        if layout == REPLICATED:
            self.weights.setdefault(name, tensor)
            return name
        # Equal parts of several devices are one weight.
        key = (name, layout, device - device % self.division.copies(layout))
        if key not in self.parts:
            part = self.name(f"{name}/part{device}")
            ranges = self.division.ranges(layout, tensor.dims[layout.axis], device)
            self.weights[part] = shard_weight(tensor, part, layout.axis, ranges, self.model.folder)
            self.parts[key] = part
        return self.parts[key]

    def convert(self, name: str, layout: Layout, device: int) -> str:
        """Add the nodes that make a device's part from the layouts that there are."""
        # A copy on this device saves an exchange, whatever the layout in which the value was produced.
        source = self.layouts.get(name, REPLICATED)
        has_copy = (name, REPLICATED, device) in self.parts
        if layout.is_split and (source == REPLICATED or has_copy):
            return self.slice_copy(name, layout, device)
        # One exchange serves all readers: the others cut their rows off the widest part that some reader wants.
        is_held = self.division.holds(source, layout)
        if layout.is_split and not is_held and (widest := self.find_widest(name, layout)) != layout:
            return self.slice_part(name, widest, layout, device)
        if layout == PARTIAL:
            return self.as_summand(name, device)
        if layout.is_split and is_held:
            return self.slice_part(name, source, layout, device)
        if self.division.shares_rows(source, layout):
            return self.pass_rows(name, source, layout, device)
        if layout == REPLICATED and source.is_split:
            return self.gather(name, source, device)
        if layout == REPLICATED:
            return self.all_reduce(name, device)
        if source == PARTIAL:
            return self.reduce_scatter(name, layout, device)
        if source.axis == layout.axis or max(self.division.copies(source), self.division.copies(layout)) > 1:
            return self.slice_copy(name, layout, device)
        return self.all_to_all(name, source, layout, device)

    def count(self, kind: str, *key: object) -> None:
        self.exchanges.setdefault(kind, set()).add(key)

    def slice(self, value: str, axis: int, low: int, high: int, device: int, moved_bytes: int) -> str:
        """Return a range of a part along an axis."""
        key = value, axis, low, high
        if key not in self.slices:
            inputs, attributes = list_slice_arguments(self.model.opset, value, axis, low, high, self.ints)
            result = f"{value}/{low}:{high}"
            self.slices[key] = self.exchange_node("Slice", inputs, result, device, moved_bytes, **attributes)
        return self.slices[key]

    def ranges_of(
        self, value: str, axis: int, size: int, ranges: Sequence[tuple[int, int]], device: int, moved_bytes: int
    ) -> str:
        """Return several ranges of a part, one after the other."""
        pieces = []
        for low, high in ranges:
            is_whole = (low, high) == (0, size)
            pieces.append(value if is_whole else self.slice(value, axis, low, high, device, 2 * moved_bytes))
        return self.concat(pieces, axis, f"{value}/cut", device, 2 * moved_bytes)

    def concat(self, pieces: Sequence[str], axis: int, result: str, device: int, moved_bytes: int) -> str:
        if len(pieces) == 1:
            return pieces[0]
        return self.exchange_node("Concat", pieces, result, device, moved_bytes, axis=axis)

    def add_up(self, name: str, pieces: Sequence[str], result: str, device: int, size_bytes: int) -> str:
        """Return the sum of pieces of a value, added from the first device's to the last one's: equal on all of them.

        One Sum waits for all pieces at once, so that the devices go on at the same time; it takes no integers.
        """
        if TensorProto.DataType.Name(self.facts.types[name]) in _SUMMED_TYPES:
            return self.exchange_node("Sum", pieces, result, device, (len(pieces) + 1) * size_bytes)
        total = pieces[0]
        for piece in pieces[1:]:
            # An Add reads two tensors and writes one.
            total = self.exchange_node("Add", [total, piece], result, device, 3 * size_bytes)
        return total

    def slice_copy(self, name: str, layout: Layout, device: int) -> str:
        size = self.facts.shapes[name][layout.axis]
        ranges = self.division.ranges(layout, size, device)
        copy = self.get(name, REPLICATED, device)
        return self.ranges_of(copy, layout.axis, size, ranges, device, self.bytes(name, layout, device))

    def slice_part(self, name: str, source: Layout, layout: Layout, device: int) -> str:
        """Return a device's part of a value, cut off a larger one that it has."""
        size, axis = self.facts.shapes[name][layout.axis], layout.axis
        wide, ranges = (self.division.ranges(item, size, device) for item in (source, layout))
        width = wide[0][1] - wide[0][0]
        # The rows of the larger part follow one another.
        starts = [row * width - first for row, (first, _) in enumerate(wide)]
        own = [(low + start, high + start) for (low, high), start in zip(ranges, starts)]
        part = self.get(name, source, device)
        return self.ranges_of(part, axis, width * len(wide), own, device, self.bytes(name, layout, device))

    def as_summand(self, name: str, device: int) -> str:
        """Return the value itself on the first device, zeros on the others."""
        copy = self.get(name, REPLICATED, device)
        # The sum over devices must be the value itself, so only one of them contributes it.
        if device == 0:
            return copy
        result = self.part_name(name, PARTIAL, device)
        return self.zeros(copy, self.facts.types[name], result, device, self.facts.bytes(name))

    def zeros(self, value: str, kind: int, result: str, device: int, size_bytes: int = 0) -> str:
        """Return zeros of the shape and element type of a value."""
        zero = self.constant("zero", np.zeros((), helper.tensor_dtype_to_np_dtype(kind)))
        # Where(false, value, 0) has the value's shape, which need not be known.
        condition = self.constant("false", np.array(False))
        return self.exchange_node("Where", [condition, value, zero], result, device, size_bytes)

    def gather(self, name: str, source: Layout, device: int) -> str:
        self.count("all-gather", name)
        holders = self.division.holders(source, device)
        pieces = [self.gathered_part(name, source, other, device) for other in holders]
        return self.merge(name, source, pieces, device, self.facts.bytes(name))

    def gathered_part(self, name: str, source: Layout, other: int, device: int) -> str:
        """Return the part of another device for an all-gather: from that device, or from the one that passes it on."""
        part, relay = self.own_part(name, source, other, device), self.find_relay(other, device)
        if relay in (other, device) or not self.costs.takes_two_rounds(source, REPLICATED, self.facts.bytes(name)):
            return part
        if (part, relay) not in self.relayed:
            moved_bytes = 2 * self.bytes(name, source, other)
            result = f"{part}/relayed{relay}"
            self.relayed[part, relay] = self.exchange_node("Identity", [part], result, relay, moved_bytes)
        return self.relayed[part, relay]

    def find_relay(self, source: int, device: int) -> int:
        """Return the device on the host of `device` that has the place of `source` on its own host."""
        home = next((host for host in self.costs.hosts if device in host), None)
        place = next((host.index(source) for host in self.costs.hosts if source in host), 0)
        return source if home is None or source in home else home[place]

    def own_part(self, name: str, layout: Layout, source: int, device: int) -> str:
        """Return another device's part of a value, without the rows that a third one passes on."""
        part = self.get_from(name, layout, source, device)
        if not layout.rows:
            return part
        low, high = layout.rows[source]
        start, end = self.division.owned(layout, self.facts.shapes[name][layout.axis], source)
        moved = 2 * self.bytes(name, layout, source)
        is_whole = (start, end) == (low, high)
        return part if is_whole else self.slice(part, layout.axis, start - low, end - low, source, moved)

    def merge(self, name: str, source: Layout, pieces: Sequence[str], device: int, size_bytes: int) -> str:
        """Return the parts of a value, each from one device, put together along their split axis."""
        axis, ordered = source.axis, []
        result = self.part_name(name, REPLICATED, device)
        # Fused values, such as query, key and value in one, have parts per row: sort the rows of all devices by row.
        if source.outer == 1:
            return self.concat(pieces, axis, result, device, 2 * size_bytes)
        for row in range(source.outer):
            for other, piece in zip(self.division.holders(source, device), pieces):
                rows = self.division.local_size(source, self.facts.shapes[name][axis], other) // source.outer
                share = size_bytes // (source.outer * len(pieces))
                ordered.append(self.slice(piece, axis, row * rows, (row + 1) * rows, device, 2 * share))
        return self.concat(ordered, axis, result, device, 2 * size_bytes)

    def all_reduce(self, name: str, device: int) -> str:
        self.count("all-reduce", name)
        size = self.facts.bytes(name)
        # Each device adds up its share, and all gather the shares: less traffic than all summands to all devices, but
        # one more round.
        if self.costs.takes_two_rounds(PARTIAL, REPLICATED, size):
            layout = self.scatter_layout(name)
            if layout is not None:
                pieces = [self.gathered_part(name, layout, other, device) for other in self.devices]
                return self.merge(name, layout, pieces, device, size)
        pieces = [self.get(name, PARTIAL, other) for other in self.devices]
        return self.add_up(name, pieces, self.part_name(name, REPLICATED, device), device, size)

    def scatter_layout(self, name: str) -> Layout | None:
        """Return the layout in which the devices share the sum of a value; None if no axis can be split."""
        fixed = self.facts.fixed.get(name, ())
        for axis, size in enumerate(self.facts.shapes[name]):
            if fixed[axis] and (layout := self.division.split(axis, size)) is not None:
                return layout
        return None

    def reduce_scatter(self, name: str, layout: Layout, device: int) -> str:
        self.count("reduce-scatter", name)
        part_bytes = self.bytes(name, layout, device)
        pieces = self.cut_for(name, PARTIAL, layout)[device]
        if self.costs.takes_two_rounds(PARTIAL, layout, self.facts.bytes(name)):
            # Each host adds up its summands where they are to leave from, in the order of the hosts.
            relays = [(host, self.find_relay(device, host[0])) for host in self.costs.hosts]
            pieces = [
                self.add_up(name, [pieces[other] for other in host], f"{name}/sum{device}", relay, part_bytes)
                for host, relay in relays
            ]
        return self.add_up(name, pieces, self.part_name(name, layout, device), device, part_bytes)

    def all_to_all(self, name: str, source: Layout, layout: Layout, device: int) -> str:
        """Return a device's part along another axis: each device sends it its share of that."""
        self.count("all-to-all", name)
        pieces, part_bytes = self.cut_for(name, source, layout)[device], self.bytes(name, layout, device)
        return self.merge(name, source, pieces, device, part_bytes)

    def cut_for(self, name: str, source: Layout, layout: Layout) -> list[list[str]]:
        """Return the pieces of a value that devices cut from what they have, [destination][source].

        Each device cuts first what it sends to the next one, and last what it keeps: so at one time, no two devices
        send to one. What leaves the host comes first.
        """
        key = name, source, layout
        if key not in self.pieces:
            count, size = len(self.devices), self.facts.shapes[name][layout.axis]
            rows: list[list[str]] = [[""] * count for _ in self.devices]
            parts = [self.own_part(name, source, other, other) for other in self.devices]
            hosts = self.costs.hosts or (tuple(self.devices),)
            places = [(host, place) for host in range(len(hosts)) for place in range(len(hosts[0]))]
            for host_step, place_step in (*places[len(hosts[0]) :], *places[1 : len(hosts[0])], places[0]):
                for host, place in places:
                    other = hosts[host][place]
                    device = hosts[(host + host_step) % len(hosts)][(place + place_step) % len(hosts[0])]
                    ranges = self.division.ranges(layout, size, device)
                    moved = self.bytes(name, layout, device) // (count if source.is_split else 1)
                    rows[device][other] = self.ranges_of(parts[other], layout.axis, size, ranges, other, moved)
            self.pieces[key] = rows
        return self.pieces[key]

    def pass_rows(self, name: str, source: Layout, layout: Layout, device: int) -> str:
        """Return a device's rows of a value: those that it has, next to those that others have."""
        axis, size = layout.axis, self.facts.shapes[name][layout.axis]
        row_bytes = self.facts.bytes(name) // size
        have, want = self.division.valid(source, size)[device], self.division.held(layout, size)[device]
        pieces = []
        for other, held in enumerate(self.division.held(source, size)):
            start, end = have if other == device else self.division.owned(source, size, other)
            # Rows that the device has itself are not sent.
            low = max(start, want[0], have[1] if other > device else 0)
            high = min(end, want[1], have[0] if other < device else size)
            if low >= high:
                continue
            # The device that has the rows cuts them off, so that only these cross.
            if (low, high) == held:
                pieces.append(self.get_from(name, source, other, device))
            else:
                part, moved = self.get(name, source, other), 2 * row_bytes * (high - low)
                pieces.append(self.slice(part, axis, low - held[0], high - held[0], other, moved))
            if other != device:
                self.count("halo", name, layout)
        return self.concat(pieces, axis, f"{name}/rows{device}", device, 2 * row_bytes * (want[1] - want[0]))

    def find_widest(self, name: str, layout: Layout) -> Layout:
        """Return the layout with the most rows that some reader wants and from which this one can be cut."""
        size = self.facts.shapes[name][layout.axis]
        wider = [wide for wide in self.wanted.get(name, ()) if self.division.holds(wide, layout)]
        totals = {wide: sum(high - low for low, high in self.division.held(wide, size)) for wide in wider}
        return max(wider, key=lambda wide: (totals[wide], wide), default=layout)
