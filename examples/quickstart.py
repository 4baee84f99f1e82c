"""Compile a CLIP-like two-tower encoder for two CPU devices; run, verify and time it.

    python examples/quickstart.py [MODEL] [--devices cpu:0,cpu:1]

Needs no GPU and no download. Writes to `quickstart/` below the current folder.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import models
from onnxplace.cli import main

SHAPES = {"two-tower": "images=4,texts=8", "transformer": "batch=2,seq=64", "decoder": "batch=2,seq=1,past=64"}
STATES = {"decoder": "present.*=past.*"}


def run_command(*arguments: str) -> None:
    """Print a command line and run it; exit if it fails."""
    print(f"\n$ onnxplace {shlex.join(arguments)}", flush=True)
    code = main(arguments)
    if code:
        raise SystemExit(code)


def run_quickstart() -> None:
    """Run the commands of the README on one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="two-tower", choices=sorted(models.MODELS))
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    options = parser.parse_args()
    folder = Path("quickstart")
    folder.mkdir(exist_ok=True)
    model, bundle = folder / f"{options.model}.onnx", folder / f"{options.model}.bundle"
    models.save(models.build(options.model), model)
    print(f"built {model} ({model.stat().st_size / 2**20:.1f} MiB, random weights)")
    shape = ["--shape", SHAPES[options.model]] if options.model in SHAPES else []
    state = ["--state", STATES[options.model]] if options.model in STATES else []
    run_command("compile", str(model), "-o", str(bundle), "--devices", options.devices, "--force", *shape, *state)
    run_command("run", str(bundle))
    run_command("verify", str(bundle), "--against", str(model))
    run_command("bench", str(bundle))


if __name__ == "__main__":
    run_quickstart()
