"""Sessions of ONNX Runtime with layers: python benchmarks/one_session.py [MODEL ...] [--devices cuda:0,cpu:0].

Each example model is compiled with the placer `one-session`, with `auto`, and with all nodes on each device that takes
them, and exported with `--to ort-layers`. Then these take turns: a session of each export, and a session without layers
(ONNX Runtime's own order of providers). Prints what the costs predict for one session, the median of the turns, and the
first over the second. Inputs and outputs are bound to the host's memory, as `session.run` has them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from time import perf_counter
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from _tables import Row, print_table, report_progress

import models
import onnxplace
from onnxplace.errors import OnnxplaceError
from onnxplace.export.segment_models import BundleModels
from onnxplace.measure.step_inputs import choose_step_inputs
from onnxplace_formats.session_prediction import predict_session

SIZES = {"transformer": {"batch": 1, "seq": 128}, "two-tower": {"images": 1, "texts": 1}}
KEYS = ("model", "placer", "devices", "predicted_seconds", "step_seconds", "to_predicted")


def compile_placements(path: Path, devices: str, folder: Path) -> Iterator[tuple[str, onnxplace.Bundle]]:
    """Yield bundles of a model by what placed them; devices that do not take all of it are left out."""
    settings: dict[str, dict[str, Any]] = {"one-session": {"placer": "one-session"}, "auto": {"placer": "auto"}}
    settings |= {f"all on {device}": {"device_map": {".*": device}} for device in devices.split(",")}
    for name, options in settings.items():
        report_progress(f"{path.stem}: {name}")
        shape = SIZES.get(path.stem, {})
        try:
            output = folder / name.replace(" ", "-").replace(":", "")
            yield name, onnxplace.compile(path, output, devices=devices, shape=shape, trial=False, **options)
        except OnnxplaceError as problem:
            report_progress(f"{path.stem}: {name}: {problem}")


def open_sessions(bundles: dict[str, onnxplace.Bundle], folder: Path) -> dict[str, Any]:
    """Return a session for each bundle, and one without layers, with the providers of the first."""
    sessions: dict[str, Any] = {}
    for number, (name, bundle) in enumerate(bundles.items()):
        output = folder / f"layers{number}"
        try:
            onnxplace.export_bundle(bundle, "ort-layers", output)
        except OnnxplaceError as problem:
            report_progress(f"{name}: {problem}")
            continue
        script = run_path(str(output / "session.py"))
        sessions[name] = script["open_session"](output)
        written = script["read_settings"](output)
        if len(written["providers"]) > 1 and "without layers" not in sessions:
            # The file of settings without the assignment.
            text = (output / "session_options.json").read_text().replace("session.layer_assignment_settings", "layers")
            (output / "session_options.json").write_text(text)
            sessions["without layers"] = script["open_session"](output)
    return sessions


def measure(sessions: dict[str, Any], feeds: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return the median time of a run of each session; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, feeds)
    end = perf_counter() + seconds
    while perf_counter() < end or not all(times.values()):
        for name, session in sessions.items():
            begin = perf_counter()
            session.run(None, feeds)
            times[name].append(perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in times.items()}


def list_rows(names: list[str], devices: str, seconds: float) -> Iterator[Row]:
    """Yield the rows of the table."""
    for name in names:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            onnx.save(models.build(name), folder / f"{name}.onnx")
            bundles = dict(compile_placements(folder / f"{name}.onnx", devices, folder))
            feeds = dict(choose_step_inputs(next(iter(bundles.values())), None, SIZES.get(name, {}), 0).feeds(0))
            for placed, measured in measure(open_sessions(bundles, folder), feeds, seconds).items():
                bundle = bundles.get(placed)
                prediction = predict_session(BundleModels(bundle)) if bundle else None
                predicted = prediction.step_seconds if prediction else None
                used = sorted({segment.device for segment in bundle.manifest.segments}) if bundle else []
                yield {
                    "model": name,
                    "placer": placed,
                    "devices": ",".join(used),
                    "predicted_seconds": predicted,
                    "step_seconds": measured,
                    "to_predicted": predicted and predicted / measured,
                }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", default=["squeezenet", "transformer", "two-encoders"])
    parser.add_argument("--devices", default="cuda:0,cpu:0", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring a model, default: %(default)s")
    options = parser.parse_args()
    print_table("One session of ONNX Runtime", KEYS, list_rows(options.names, options.devices, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
