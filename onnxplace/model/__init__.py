"""The door to ONNX: models, weights, nested graphs and carried state."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.model.loading import load as load
    from onnxplace.model.lowering import bind as bind
    from onnxplace.model.model import Model as Model
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
