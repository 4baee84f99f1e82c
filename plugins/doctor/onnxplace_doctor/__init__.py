"""What a machine has and does: `onnxplace devices`, calibration, `machines`, and the self-check `doctor`."""
