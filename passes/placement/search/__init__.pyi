from onnxplace.passes.placement.search.decode_kernels import (
    Scratch as Scratch,
    Wiring as Wiring,
    decode as decode,
    new_scratch as new_scratch,
    run_order as run_order,
)
from onnxplace.passes.placement.search.heft_kernels import (
    PartialPlan as PartialPlan,
    arrival_time as arrival_time,
    empty_plan as empty_plan,
    settle_group as settle_group,
)
from onnxplace.passes.placement.search.placement_search import (
    Budget as Budget,
    Candidate as Candidate,
    SearchSpace as SearchSpace,
    coarsen as coarsen,
    evaluate_candidate as evaluate_candidate,
    explore as explore,
    finest_level as finest_level,
)
from onnxplace.passes.placement.search.portfolio import (
    PlacerPlan as PlacerPlan,
    improve_and_commit as improve_and_commit,
    plan_blocks as plan_blocks,
    published_plans as published_plans,
    search_and_commit as search_and_commit,
)
from onnxplace.passes.placement.search.series_blocks import (
    BlockPlan as BlockPlan,
    compose_blocks as compose_blocks,
    decompose_series as decompose_series,
)
