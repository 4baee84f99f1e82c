"""Reports in a real browser; `.ci/report` finds Chromium, and sets ONNXPLACE_TEST_BROWSER to its folder."""

import os

collect_ignore_glob = [] if os.environ.get("ONNXPLACE_TEST_BROWSER") else ["*"]
