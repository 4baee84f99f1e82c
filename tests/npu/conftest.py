"""Tests on an NPU: that of `onnxruntime-qnn`, whose library for x86-64 simulates one; `.ci/npu` installs it."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("onnxruntime_qnn") else ["*"]
