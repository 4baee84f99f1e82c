"""Placers for onnxplace that learn, their training, and the graphs that they learn from."""
