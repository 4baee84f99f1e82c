"""What nodes cost: measured with ONNX Runtime, or estimated."""
