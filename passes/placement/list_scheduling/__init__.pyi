from onnxplace.passes.placement.list_scheduling.list_planner import (
    fill_devices as fill_devices,
    find_best_plan as find_best_plan,
    generate_plans as generate_plans,
    place_by_list_schedule as place_by_list_schedule,
    plan as plan,
)
from onnxplace.passes.placement.list_scheduling.sct_favourites import (
    favourite_children as favourite_children,
    transfer_edges as transfer_edges,
)
