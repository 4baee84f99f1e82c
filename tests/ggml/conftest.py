"""Tests with the provider of onnxruntime-ggml; `.ci/ggml` installs it, and names its library."""

import os

collect_ignore_glob = [] if "ggml=" in os.environ.get("ONNXPLACE_PROVIDER_LIBRARIES", "") else ["*"]
