"""Compile a CLIP-like two-tower encoder for two CPU devices, run it, verify it, and time it beside one session.

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


def command(*arguments: str) -> None:
    """Show a command as a user would type it, and run it; stops at the first that fails."""
    print(f"\n$ onnxplace {shlex.join(arguments)}", flush=True)
    code = main(arguments)
    if code:
        raise SystemExit(code)


def quickstart() -> None:
    """Run the commands of the README on one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="two-tower", choices=sorted(models.MODELS))
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    chosen = parser.parse_args()
    folder = Path("quickstart")
    folder.mkdir(exist_ok=True)
    model, bundle = folder / f"{chosen.model}.onnx", folder / f"{chosen.model}.bundle"
    models.save(models.build(chosen.model), model)
    print(f"built {model} ({model.stat().st_size / 2**20:.1f} MiB, random weights)")
    shape = ["--shape", SHAPES[chosen.model]] if chosen.model in SHAPES else []
    state = ["--state", STATES[chosen.model]] if chosen.model in STATES else []
    command("compile", str(model), "-o", str(bundle), "--devices", chosen.devices, "--force", *shape, *state)
    command("run", str(bundle))
    command("verify", str(bundle), "--against", str(model))
    command("bench", str(bundle))


if __name__ == "__main__":
    quickstart()
