from onnxplace.passes.placement.list_scheduling.favourites import (
    favourite_children as favourite_children,
    transfer_edges as transfer_edges,
)
from onnxplace.passes.placement.list_scheduling.filling import fill_devices as fill_devices
from onnxplace.passes.placement.list_scheduling.planner import (
    find_best_plan as find_best_plan,
    generate_plans as generate_plans,
    place_by_list_schedule as place_by_list_schedule,
    plan as plan,
)
