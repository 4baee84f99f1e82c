"""Step times of real architectures: python benchmarks/step_times.py [NAME ...] [--devices cpu:0,cpu:1].

For each model, all in one run and in turn: the bundle, one session on a single device's cores, one session with all
cores. Prints a Markdown table; docs/measurements.md holds the latest.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import onnxplace
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_cores
from onnxplace.measure.compare import compare_outputs, open_reference, time_in_turns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import models

SHAPES = {
    "two-tower": {"images": 4, "texts": 8},
    "transformer": {"batch": 2, "seq": 64},
    "decoder": {"batch": 2, "seq": 1, "past": 64},
}
HEADER = (
    "model", "placer", "nodes", "segments", "predicted ms", "measured ms", "error", "one device ms",
    "speed-up over one device", "all cores ms", "speed-up over all cores", "largest difference",
)  # fmt: skip


def measure_row(name: str, placer: str, devices: str, repeat: int, folder: Path) -> list[str]:
    """Compile, verify and time one model with one placer."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        models.save(models.build(name), path)
    shape = SHAPES.get(name)
    bundle = onnxplace.compile(path, folder / "bundle", devices=devices, shape=shape, placer=placer, force=True)
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)
    all_cores, one_device = (
        open_reference(bundle, path, available_cores()),
        open_reference(bundle, path, available_cores()[: bundle.target.devices[0].cores]),
    )
    with onnxplace.InferenceSession(bundle) as session:
        names = [item.name for item in bundle.outputs]
        differences = compare_outputs(lambda f: session.submit(f).result().outputs, all_cores, feeds, names)
        calls = {
            "bundle": lambda: session.run(None, feeds),
            "one": lambda: one_device(feeds),
            "all": lambda: all_cores(feeds),
        }
        times = {key: item.median_seconds for key, item in time_in_turns(calls, repeat).items()}
    assert all(item.equal for item in differences), differences
    predicted = bundle.manifest.predicted.step_seconds
    return [
        name, placer, str(sum(d.nodes for d in bundle.manifest.devices)), str(len(bundle.manifest.segments)),
        f"{predicted * 1e3:.1f}", f"{times['bundle'] * 1e3:.1f}", f"{predicted / times['bundle'] - 1:+.0%}",
        f"{times['one'] * 1e3:.1f}", f"{times['one'] / times['bundle']:.2f}x", f"{times['all'] * 1e3:.1f}",
        f"{times['all'] / times['bundle']:.2f}x", f"{max(item.max_rel_error for item in differences):.1e}",
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(models.MODELS))
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--placers", default="m-etf")
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    for name in options.names:
        folder = Path(tempfile.mkdtemp(prefix="onnxplace-bench-"))
        try:
            for placer in options.placers.split(","):
                print(
                    f"| {' | '.join(measure_row(name, placer, options.devices, options.repeat, folder))} |", flush=True
                )
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
