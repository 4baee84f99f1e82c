"""Formats of other programs: what `onnxplace export` writes, and cost graphs in networkx, GraphML and from a seed."""
