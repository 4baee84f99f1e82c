"""onnxplace: the placement compiler for ONNX.

>>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
>>> with onnxplace.InferenceSession(bundle) as session:  # doctest: +SKIP
...     outputs = session.run(None, feeds)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxplace._lazy import attach
from onnxplace._version import __version__ as __version__

if TYPE_CHECKING:
    from onnxplace.api import Conversation, InferenceSession, compile, load  # noqa: A004
    from onnxplace.bundle import Bundle
    from onnxplace.errors import (
        BrokenPassError,
        BundleError,
        Diagnostic,
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
    from onnxplace.export import export_bundle, merge_bundle
    from onnxplace.graph import OpGraph
    from onnxplace.pipeline import Pipeline
    from onnxplace.runtime import Runtime, RuntimeSession
    from onnxplace.serving import Batching
    from onnxplace.state import Pass, State
    from onnxplace.target import Device, Link, Target
    from onnxplace.training import StepResult, Trainer

__all__ = [
    "Batching",
    "BrokenPassError",
    "Bundle",
    "BundleError",
    "Conversation",
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
    "StepResult",
    "Target",
    "TargetError",
    "Trainer",
    "UsageError",
    "compile",
    "export_bundle",
    "load",
    "merge_bundle",
]

__getattr__, __dir__, _ = attach(
    __name__,
    {
        "api": "Conversation InferenceSession compile load",
        "bundle": "Bundle",
        "errors": (
            "BrokenPassError BundleError Diagnostic ExecutionError FeedError InfeasibleError InputError ModelError "
            "OnnxplaceError PluginError RunTimeoutError TargetError UsageError"
        ),
        "export": "export_bundle merge_bundle",
        "graph": "OpGraph",
        "pipeline": "Pipeline",
        "runtime": "Runtime RuntimeSession",
        "serving": "Batching",
        "state": "Pass State",
        "target": "Device Link Target",
        "training": "StepResult Trainer",
    },
)
