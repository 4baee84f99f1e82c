"""ATen operators in ONNX, one module for each kind."""
