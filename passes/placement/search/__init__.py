"""Search over placements: coarsening, annealing, a portfolio of placers."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.search.coarsening import coarsen as coarsen
    from onnxplace.passes.placement.search.portfolio import (
        Plan as Plan,
        improve_and_commit as improve_and_commit,
        published_plans as published_plans,
        search_and_commit as search_and_commit,
    )
    from onnxplace.passes.placement.search.search import (
        Budget as Budget,
        SearchSpace as SearchSpace,
        evaluate_candidate as evaluate_candidate,
        explore as explore,
    )
    from onnxplace.passes.placement.search.series_blocks import (
        BlockPlan as BlockPlan,
        compose_blocks as compose_blocks,
        decompose_series as decompose_series,
        interchangeable_devices as interchangeable_devices,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "coarsening": "coarsen",
        "portfolio": "Plan improve_and_commit published_plans search_and_commit",
        "search": "Budget SearchSpace evaluate_candidate explore",
        "series_blocks": "BlockPlan compose_blocks decompose_series interchangeable_devices",
    },
)
