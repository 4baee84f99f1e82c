"""onnxplace: the placement compiler for ONNX.

>>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
>>> with onnxplace.InferenceSession(bundle) as session:  # doctest: +SKIP
...     outputs = session.run(None, feeds)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxplace.api import InferenceSession, compile, load  # noqa: A004
    from onnxplace.bundle import Bundle
    from onnxplace.errors import (
        BrokenPassError,
        BundleError,
        ExecutionError,
        FeedError,
        InfeasibleError,
        InputError,
        ModelError,
        OnnxplaceError,
        PluginError,
        RunTimeoutError,
        TargetError,
        UsageError,
    )
    from onnxplace.graph import OpGraph
    from onnxplace.pipeline import Pipeline
    from onnxplace.runtime import Runtime, RuntimeSession
    from onnxplace.state import Diagnostic, Pass, State
    from onnxplace.target import Device, Link, Target

__version__ = "0.1.0"

_HOMES = {
    "BrokenPassError": "errors",
    "Bundle": "bundle",
    "BundleError": "errors",
    "Device": "target",
    "Diagnostic": "state",
    "ExecutionError": "errors",
    "FeedError": "errors",
    "InferenceSession": "api",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "Link": "target",
    "ModelError": "errors",
    "OnnxplaceError": "errors",
    "OpGraph": "graph",
    "Pass": "state",
    "Pipeline": "pipeline",
    "PluginError": "errors",
    "RunTimeoutError": "errors",
    "Runtime": "runtime",
    "RuntimeSession": "runtime",
    "State": "state",
    "Target": "target",
    "TargetError": "errors",
    "UsageError": "errors",
    "compile": "api",
    "load": "api",
}

__all__ = [
    "BrokenPassError",
    "Bundle",
    "BundleError",
    "Device",
    "Diagnostic",
    "ExecutionError",
    "FeedError",
    "InfeasibleError",
    "InferenceSession",
    "InputError",
    "Link",
    "ModelError",
    "OnnxplaceError",
    "OpGraph",
    "Pass",
    "Pipeline",
    "PluginError",
    "RunTimeoutError",
    "Runtime",
    "RuntimeSession",
    "State",
    "Target",
    "TargetError",
    "UsageError",
    "compile",
    "load",
]


def __getattr__(name: str) -> object:
    """Import public names when they are first used, so that `import onnxplace` stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxplace' has no attribute {name!r}")
    return getattr(import_module(f"onnxplace.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
