"""The commands `onnxplace learn` and `onnxplace study`."""
