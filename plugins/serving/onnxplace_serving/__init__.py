"""A server of bundles: the command `onnxplace serve`, its protocols, its limits."""
