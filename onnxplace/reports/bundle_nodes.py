"""The nodes of a bundle as reports show them: devices, shapes, costs, and the values between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from onnxplace.bundle.bundle import COSTS_FILE, WHOLE_MODEL_FILE, Bundle
from onnxplace.errors import OnnxplaceError
from onnxplace.model.empty_axes import list_own_nodes
from onnxplace.model.nested_graphs import iterate_reads
from onnxplace.model.node_metadata import find_module_path, normalize_module
from onnxplace.model.shape_inference import infer_shapes
from onnxplace.reports.layer_tree import NODE_PART, LayerNode, name_layer, name_segment, sort_forward
from onnxplace.reports.page_records import NodeEdges, SegmentSummary
from onnxplace.utils.files import read_json
from onnxplace.utils.groups import group_pairs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorShapeProto


@dataclass(frozen=True)
class BundleNodes:
    """The nodes of a bundle in the order of the whole model, and what they are parts of.

    Nodes that it does not have, such as those of exchanges, follow in the order of the segments.
    """

    nodes: tuple[LayerNode, ...]
    edges: NodeEdges
    layers: Mapping[str, str]
    """Value -> layer of the node that computes it."""
    segments: tuple[SegmentSummary, ...]


def read_nodes(bundle: Bundle) -> BundleNodes:
    """Return the nodes of a bundle, with their planned times where costs.json has them."""
    import onnx

    manifest, costs = bundle.manifest, _read_costs(bundle)
    whole = onnx.load(bundle.file(WHOLE_MODEL_FILE), load_external_data=False)
    position = {node.name: index for index, node in enumerate(whole.graph.node)}
    devices = {device.id: (index, device.cost_class) for index, device in enumerate(bundle.target.devices)}
    entries: list[tuple[LayerNode, NodeProto]] = []
    for number, segment in enumerate(manifest.segments):
        index, cost_class = devices[segment.device]
        model = onnx.load(bundle.file(segment.file), load_external_data=False)
        shapes = _infer_shapes(model, manifest.dimensions)
        for node in list_own_nodes(model.graph):
            cost = costs.nodes.get(node.name, _NodeCosts())
            planned, source = cost.seconds.get(cost_class, 0.0), cost.source.get(cost_class, "")
            seconds = 0.0 if planned == "refused" else planned
            shape = ", ".join(shapes[name] for name in node.output if name in shapes)
            name = node.name or node.op_type
            entries.append((LayerNode(name, node.op_type, index, seconds, -1, number, shape, source), node))
    entries.sort(key=lambda entry: position.get(NODE_PART.sub("", entry[0].name), len(position)))
    producer = {name: index for index, (_, node) in enumerate(entries) for name in node.output if name}
    # Parts of split operators have no costs, but what crosses between segments has a size.
    sizes = {name: value.bytes for name, value in manifest.values.items()} | costs.value_bytes
    links = [
        (producer[name], index, sizes.get(name, 0))
        for index, (_, node) in enumerate(entries)
        for name in dict.fromkeys(iterate_reads(node))
        if name in producer
    ]
    edges = NodeEdges(*zip(*links))
    paths = _find_paths([node for _, node in entries], edges)
    nodes = tuple(replace(node, name=paths[index], index=index) for index, (node, _) in enumerate(entries))
    members, segments = group_pairs((item.segment, item) for item in nodes), []
    for number, segment in enumerate(manifest.segments):
        planned = segment.seconds if segment.planned_seconds is None else segment.planned_seconds
        segments.append(SegmentSummary(segment.id, name_segment(members.get(number, ())), segment.seconds, planned))
    layers = {name: name_layer(paths[index]) for name, index in producer.items()}
    return BundleNodes(nodes, edges, layers, tuple(segments))


def _find_paths(nodes: Sequence[NodeProto], edges: NodeEdges) -> list[str]:
    """Return the names of nodes with their modules; one that the compiler added is in the module of what it reads."""
    paths, modules = [node.name or node.op_type for node in nodes], dict[int, str]()
    first_read = dict(zip(reversed(edges.reader), reversed(edges.source)))
    for index in sort_forward(len(nodes), {*zip(edges.source, edges.reader)}):
        node, before = nodes[index], modules.get(first_read.get(index, -1), "")
        modules[index] = module = find_module_path(node) if node.metadata_props else before
        if module and not normalize_module(node.name).startswith(f"{module}."):
            paths[index] = f"{module}/{paths[index]}"
    return paths


def _infer_shapes(model: ModelProto, dimensions: Mapping[str, int]) -> dict[str, str]:
    """Return the shapes of values as text, such as `4x196x256`, with the sizes that the costs assume."""
    import onnx

    for value in model.graph.input:
        for dimension in value.type.tensor_type.shape.dim:
            if (size := dimensions.get(dimension.dim_param)) is not None:
                dimension.dim_value = size
    try:
        graph = infer_shapes(infer_shapes(model), data_prop=True).graph
    except onnx.shape_inference.InferenceError:  # custom operators, or types that it does not know
        graph = model.graph
    return {
        value.name: "x".join(_format_size(item, dimensions) for item in value.type.tensor_type.shape.dim) or "scalar"
        for value in (*graph.output, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }


def _format_size(size: TensorShapeProto.Dimension, dimensions: Mapping[str, int]) -> str:
    return str(size.dim_value if size.HasField("dim_value") else dimensions.get(size.dim_param, size.dim_param or "?"))


class _NodeCosts(BaseModel):
    """The costs of a node, by class of device."""

    seconds: dict[str, Annotated[float, Field(allow_inf_nan=False)] | Literal["refused"]] = {}
    source: dict[str, str] = {}


class _Costs(BaseModel):
    """The parts of a cost file that a report shows."""

    nodes: dict[str, _NodeCosts] = {}
    value_bytes: dict[str, int] = {}


def _read_costs(bundle: Bundle) -> _Costs:
    """Return the costs of a bundle; none where the file does not tell."""
    try:
        return _Costs.model_validate(read_json(bundle.file(COSTS_FILE), "C011", "a cost file"))
    except (OnnxplaceError, ValidationError):
        return _Costs()
