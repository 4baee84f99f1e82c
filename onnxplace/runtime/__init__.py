"""The interface of runtimes, and the timelines of the requests that they run."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.runtime.interface import (
        Event as Event,
        Result as Result,
        Runtime as Runtime,
        RuntimeSession as RuntimeSession,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
