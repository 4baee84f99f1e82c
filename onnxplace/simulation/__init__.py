"""Simulated time and memory of a placed graph, and lower bounds on them."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.simulation.simulator import simulate as simulate
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
