"""Tests on a processor by OpenVINO; `.ci/openvino` installs it, and sets ONNXPLACE_TEST_OPENVINO=1."""

import os

collect_ignore_glob = [] if os.environ.get("ONNXPLACE_TEST_OPENVINO") == "1" else ["*"]
