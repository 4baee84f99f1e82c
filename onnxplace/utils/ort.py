"""ONNX Runtime as a package: import it once, say what is wrong with its installation, probe its providers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

from onnxplace.errors import ExecutionError

INSTALL_HINT = (
    "pip install 'onnxplace[cpu]' (or 'onnxplace[gpu]' on a machine with CUDA 13, 'onnxplace[webgpu]' for other GPUs)"
)
# Each of them brings a package of the name `onnxruntime`.
WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-webgpu",
    "onnxruntime-directml",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
)


@lru_cache(maxsize=1)
def import_onnxruntime() -> Any:
    """Import ONNX Runtime once.

    Telemetry is off unless the user set it. Raises ExecutionError for a broken installation.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    installed = list_installed_wheels()
    if len(installed) > 1:
        number = "both" if len(installed) == 2 else "all"
        message = f"{' and '.join(installed)} are {number} installed and overwrite each other"
        raise ExecutionError("R001", message, hint=f"pip uninstall -y {' '.join(installed)}, then {INSTALL_HINT}")
    try:
        import onnxruntime
    except (ImportError, OSError) as problem:
        raise ExecutionError("R001", f"ONNX Runtime cannot be imported: {problem}", hint=INSTALL_HINT) from None
    if not hasattr(onnxruntime, "InferenceSession"):
        message = "the installed onnxruntime is empty: another wheel that shares its files was removed"
        raise ExecutionError("R001", message, hint=f"pip uninstall -y {' '.join(WHEELS)}, then {INSTALL_HINT}")
    return onnxruntime


def list_installed_wheels() -> list[str]:
    """Return the installed distributions that bring the package `onnxruntime`; more than one is an error."""
    return [name for name in WHEELS if any(metadata.distributions(name=name))]


def build_one_node_model() -> bytes:
    """Return a serialised model of one node."""
    from onnx import parser

    text = '<ir_version: 8, opset_import: ["": 17]> one_node (float[1] x) => (float[1] y) { y = Relu(x) }'
    return bytes(parser.parse_model(text).SerializeToString())


def find_provider_problem(
    provider: str, options: dict[str, str], fallback_reason: str, entries: Mapping[str, str] | None = None
) -> str | None:
    """Return why ONNX Runtime cannot use an execution provider with these options; None if it can.

    It opens a session, since the list of available providers names those compiled in, whether they work or not.

    Args:
        provider: Such as `CUDAExecutionProvider`.
        options: Of the provider.
        fallback_reason: What a silent fallback to the CPU means.
        entries: For the configuration of the session.
    """
    runtime = import_onnxruntime()
    if provider not in runtime.get_available_providers():
        short = provider.removesuffix("ExecutionProvider")
        return f"the installed onnxruntime {runtime.__version__} has no {short} provider"
    session_options = runtime.SessionOptions()
    session_options.log_severity_level = 4  # failures arrive as exceptions
    for key, value in (entries or {}).items():
        session_options.add_session_config_entry(key, value)
    try:
        # With `enable_fallback`, ONNX Runtime would print to stdout.
        session = runtime.InferenceSession(
            build_one_node_model(), session_options, providers=[(provider, options)], enable_fallback=0
        )
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        # Before these words, there is a place in the sources of ONNX Runtime, and a condition.
        return f"ONNX Runtime cannot open it: {str(problem).splitlines()[0].rpartition(' was false. ')[2]}"
    if session.get_providers()[0] != provider:
        return f"ONNX Runtime fell back to the CPU: {fallback_reason}"
    return None
