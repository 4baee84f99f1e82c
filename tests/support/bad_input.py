"""Helpers of tests about bad input."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import parser

SHAPE = ("--shape", "batch=4")
SCRIPT = """
import os, resource, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it
if "LIMIT" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT"]),) * 2)
from onnxplace.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def contents(folder: Path) -> dict[str, object]:
    """Return everything below a folder: links with their targets, files with their bytes, folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def parse_graph(text: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')


def store(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model as it is; `onnx.save` would look into it."""
    path.write_bytes(model.SerializeToString())
    return path


def edit_manifest(bundle: Path, change: Callable[[dict], object]) -> None:
    """Alter the manifest of a bundle."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def run_script(folder: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, with its temporary files in `folder`/tmp."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
