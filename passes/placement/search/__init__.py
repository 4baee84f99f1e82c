"""Search over placements: coarsening, annealing, a portfolio of placers."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.search.coarsening import levels as levels
    from onnxplace.passes.placement.search.portfolio import (
        Plan as Plan,
        improve_and_decide as improve_and_decide,
        published_plans as published_plans,
        search_and_decide as search_and_decide,
    )
    from onnxplace.passes.placement.search.search import (
        Budget as Budget,
        Ground as Ground,
        candidate as candidate,
        explore as explore,
    )
    from onnxplace.passes.placement.search.series_blocks import (
        Step as Step,
        alike as alike,
        composed as composed,
        series as series,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "coarsening": "levels",
        "portfolio": "Plan improve_and_decide published_plans search_and_decide",
        "search": "Budget Ground candidate explore",
        "series_blocks": "Step alike composed series",
    },
)
