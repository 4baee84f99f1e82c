"""Programs and modules of PyTorch as ONNX models, and training steps of modules."""
