"""The nodes of a bundle as reports show them: devices, shapes, costs, and the values between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.bundle import COSTS_FILE, WHOLE_MODEL_FILE, Bundle, Manifest
from onnxplace.errors import OnnxplaceError
from onnxplace.model import iterate_reads
from onnxplace.report.layer_tree import LayerNode, find_separator, name_layer, name_segment
from onnxplace.report.page_records import NodeEdges, SegmentSummary
from onnxplace.utils import read_json

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, ValueInfoProto


@dataclass(frozen=True)
class ModelNodes:
    """The nodes of a bundle, or of a placed cost graph, in the order of the model.

    Parts of split operators, which the whole model does not have, follow in the order of the segments.
    """

    nodes: tuple[LayerNode, ...]
    edges: NodeEdges
    producer: Mapping[str, int]
    """Value -> index of the node that computes it."""

    def name_layer_of(self, value: str) -> str:
        """Return the layer of the node that computes a value; empty for an input of the model."""
        index = self.producer.get(value, -1)
        return name_layer(self.nodes[index].name, find_separator(self.nodes)) if index >= 0 else ""


def read_nodes(bundle: Bundle) -> ModelNodes:
    """Return the nodes of a bundle, with their planned times where costs.json has them."""
    import onnx

    whole = onnx.load(bundle.file(WHOLE_MODEL_FILE), load_external_data=False)
    position = {node.name: index for index, node in enumerate(whole.graph.node)}
    devices = {device.id: (index, device) for index, device in enumerate(bundle.target.devices)}
    costs, sizes = _read_costs(bundle)
    entries: list[tuple[LayerNode, list[str], list[str]]] = []
    for number, segment in enumerate(bundle.manifest.segments):
        index, device = devices[segment.device]
        model = onnx.load(bundle.file(segment.file), load_external_data=False)
        shapes = _infer_shapes(model, bundle.manifest.dimensions)
        for node in model.graph.node:
            seconds, source = costs.get(node.name, {}).get(device.cost_class, (0.0, ""))
            shape = ", ".join(filter(None, (shapes.get(name, "") for name in node.output)))
            name = node.name or node.op_type
            entry = LayerNode(name, node.op_type, index, seconds, -1, number, shape, source)
            entries.append((entry, list(iterate_reads(node)), list(node.output)))
    entries.sort(key=lambda entry: position.get(entry[0].name, len(position)))
    producer = {name: index for index, (_, _, outputs) in enumerate(entries) for name in outputs if name}
    triples = [
        (producer[name], index, sizes.get(name, 0))
        for index, (_, reads, _) in enumerate(entries)
        for name in dict.fromkeys(reads)
        if name in producer
    ]
    nodes = tuple(replace(node, index=index) for index, (node, _, _) in enumerate(entries))
    return ModelNodes(nodes, build_edges(triples), producer)


def build_edges(triples: Sequence[tuple[int, int, int]]) -> NodeEdges:
    """Return edges, given as producer, reader and bytes, as columns."""
    source, reader, sizes = zip(*triples) if triples else ((), (), ())
    return NodeEdges(source, reader, sizes)


def summarise_segments(manifest: Manifest, nodes: Sequence[LayerNode]) -> tuple[SegmentSummary, ...]:
    """Return each segment with its layers and operators as its title."""
    separator, own = find_separator(nodes), [list[LayerNode]() for _ in manifest.segments]
    for node in nodes:
        own[node.segment].append(node)
    target = manifest.target.target()
    return tuple(
        SegmentSummary(
            id=segment.id,
            title=name_segment(members, separator) if members else segment.id,
            device=target.position(segment.device),
            nodes=segment.nodes,
            seconds=segment.seconds,
            planned_seconds=segment.seconds if segment.planned_seconds is None else segment.planned_seconds,
            source="costs of nodes" if segment.planned_seconds is None else "trial",
        )
        for segment, members in zip(manifest.segments, own)
    )


def _infer_shapes(model: ModelProto, dimensions: Mapping[str, int]) -> dict[str, str]:
    """Return the shapes of values as text, such as `4x196x256`, with the sizes that the costs assume."""
    import onnx

    for value in model.graph.input:
        for dimension in value.type.tensor_type.shape.dim:
            if (size := dimensions.get(dimension.dim_param)) is not None:
                dimension.dim_value = size
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except onnx.shape_inference.InferenceError:  # custom operators, or types that it does not know
        graph = model.graph
    return {value.name: _format_shape(value, dimensions) for value in _iterate_values(graph)}


def _iterate_values(graph: GraphProto) -> Iterator[ValueInfoProto]:
    yield from (item for item in (*graph.output, *graph.value_info) if item.type.tensor_type.HasField("shape"))


def _format_shape(value: ValueInfoProto, dimensions: Mapping[str, int]) -> str:
    sizes = [
        item.dim_value if item.HasField("dim_value") else dimensions.get(item.dim_param, item.dim_param or "?")
        for item in value.type.tensor_type.shape.dim
    ]
    return "x".join(map(str, sizes)) or "scalar"


def _read_costs(bundle: Bundle) -> tuple[dict[str, dict[str, tuple[float, str]]], dict[str, int]]:
    """Return seconds and their source by node and class of device, and the bytes of values; empty where not told."""
    try:
        data = read_json(bundle.file(COSTS_FILE), "C011", "a cost file")
    except OnnxplaceError:
        return {}, {}
    nodes: Any = data.get("nodes") if isinstance(data, dict) else None
    sizes: Any = data.get("value_bytes") if isinstance(data, dict) else None
    return (
        {name: _read_times(entry) for name, entry in _as_dict(nodes).items()},
        {name: size for name, size in _as_dict(sizes).items() if isinstance(size, int)},
    )


def _read_times(entry: Any) -> dict[str, tuple[float, str]]:
    sources = _as_dict(_as_dict(entry).get("source"))
    return {
        name: (float(value), str(sources.get(name, "")))
        for name, value in _as_dict(_as_dict(entry).get("seconds")).items()
        if isinstance(value, (int, float)) and np.isfinite(value)
    }


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
