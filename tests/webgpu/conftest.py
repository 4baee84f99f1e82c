"""Tests on a GPU by WebGPU; `.ci/webgpu` sets up the environment that they need, and ONNXPLACE_TEST_WEBGPU=1."""

import os

collect_ignore_glob = [] if os.environ.get("ONNXPLACE_TEST_WEBGPU") == "1" else ["*"]
