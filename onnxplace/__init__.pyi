from onnxplace.api import compile as compile, plan as plan, report as report  # noqa: A004
from onnxplace.benchmark import bench as bench
from onnxplace.bundle import Bundle as Bundle
from onnxplace.errors import (
    ArgumentError as ArgumentError,
    BrokenPassError as BrokenPassError,
    BundleError as BundleError,
    Diagnostic as Diagnostic,
    ExecutionError as ExecutionError,
    FeedError as FeedError,
    InfeasibleError as InfeasibleError,
    InputError as InputError,
    ModelError as ModelError,
    OnnxplaceError as OnnxplaceError,
    PluginError as PluginError,
    RunTimeoutError as RunTimeoutError,
    TargetError as TargetError,
    UsageError as UsageError,
)
from onnxplace.export import export_bundle as export_bundle, merge_bundle as merge_bundle
from onnxplace.graph import OpGraph as OpGraph
from onnxplace.pipeline import Pipeline as Pipeline
from onnxplace.runtime import Runtime as Runtime, RuntimeSession as RuntimeSession
from onnxplace.serving import Batching as Batching
from onnxplace.session import (
    Conversation as Conversation,
    InferenceSession as InferenceSession,
    load as load,
)
from onnxplace.state import Pass as Pass, State as State
from onnxplace.target import Device as Device, Link as Link, Target as Target
from onnxplace.verification import verify as verify

__version__: str
