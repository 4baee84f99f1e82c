"""Sessions of users: bundles run as ONNX Runtime's sessions do, requests joined, `bench` and `verify`."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.session.inference_session import (
        Conversation as Conversation,
        InferenceSession as InferenceSession,
        load as load,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
