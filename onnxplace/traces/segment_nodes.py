"""The names of the nodes in each segment."""

from __future__ import annotations

from onnxplace.bundle import Bundle


def read_segment_nodes(bundle: Bundle) -> dict[str, tuple[str, ...]]:
    """Return the names of the nodes of each segment, by segment; a node without a name goes by its operator."""
    import onnx

    models = {item.id: onnx.load(bundle.file(item.file), load_external_data=False) for item in bundle.manifest.segments}
    return {segment: tuple(node.name or node.op_type for node in model.graph.node) for segment, model in models.items()}
