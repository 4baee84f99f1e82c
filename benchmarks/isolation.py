"""Time a node on an isolated device and in this process: `python benchmarks/isolation.py`.

It prints a table for docs/target.md: medians in milliseconds, by the bytes of the one input, which is also the output.
"""

import time
from statistics import median
from typing import Any

import numpy as np
import psutil
from onnx import parser

from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, pin_thread
from onnxplace.reports.text import format_table
from onnxplace.target.device_kinds import DeviceAddress

MODEL = '<ir_version: 8, opset_import: ["": 17]> one (float[n] x) => (float[n] y) { y = Relu(x) }'
SIZES = (1 << 10, 1 << 20, 16 << 20)
RUNS = 200


def time_runs(session: Any, size: int) -> float:
    """Return the median time of a run in milliseconds."""
    feeds, seconds = {"x": np.ones(size // 4, np.float32)}, []
    for _ in range(RUNS):
        began = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds)


def main() -> None:
    """Print the table."""
    model = parser.parse_model(MODEL).SerializeToString()
    with pin_thread((0,)):
        plain = open_session(model, make_session_options((0,)))
    began = time.perf_counter()
    with pin_thread((1,)):
        isolated = open_session(model, make_session_options((1,)), DeviceAddress("cpu", 0, options={"isolate": "true"}))
    opening = time.perf_counter() - began
    rows = [(f"{size:,}", f"{time_runs(plain, size):.3f}", f"{time_runs(isolated, size):.3f}") for size in SIZES]
    print(format_table(("bytes", "in this process", "isolated"), rows))
    resident = psutil.Process().children()[0].memory_info().rss >> 20
    print(f"the process starts in {opening:.2f} s, and takes {resident} MiB with one node")


if __name__ == "__main__":
    main()
