"""onnxplace: the placement compiler for ONNX.

>>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
>>> outputs = onnxplace.InferenceSession(bundle).run(None, feeds)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from onnxplace import _startup as _startup
from onnxplace._lazy import attach
from onnxplace._version import __version__ as __version__

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import Bundle as Bundle
    from onnxplace.driver.api import compile as compile, plan as plan, report as report  # noqa: A004
    from onnxplace.errors import (  # isort: skip
        ArgumentError as ArgumentError, BrokenPassError as BrokenPassError, BundleError as BundleError,
        Diagnostic as Diagnostic, ExecutionError as ExecutionError, FeedError as FeedError,
        InfeasibleError as InfeasibleError, InputError as InputError, ModelError as ModelError,
        OnnxplaceError as OnnxplaceError, PluginError as PluginError, RunTimeoutError as RunTimeoutError,
        TargetError as TargetError, UsageError as UsageError,
    )  # fmt: skip
    from onnxplace.export.exporting import export_bundle as export_bundle
    from onnxplace.export.merging import merge_bundle as merge_bundle
    from onnxplace.graph.op_graph import OpGraph as OpGraph
    from onnxplace.pipeline.pipeline import Pipeline as Pipeline
    from onnxplace.runtime.interface import Runtime as Runtime, RuntimeSession as RuntimeSession
    from onnxplace.session.batched_session import Batching as Batching
    from onnxplace.session.benchmark import bench as bench
    from onnxplace.session.inference_session import (
        Conversation as Conversation,
        InferenceSession as InferenceSession,
        load as load,
    )
    from onnxplace.session.verification import verify as verify
    from onnxplace.state import Pass as Pass, State as State
    from onnxplace.target.target import Device as Device, Link as Link, Target as Target
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
