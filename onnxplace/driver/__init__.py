"""From a model to a bundle, and from a cost graph to a placement."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.driver.choose import Objective as Objective
    from onnxplace.driver.place import place_cost_graph as place_cost_graph
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
