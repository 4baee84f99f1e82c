"""The self-check of a machine: `onnxplace doctor`."""
