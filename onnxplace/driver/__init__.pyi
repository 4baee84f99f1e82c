from onnxplace.driver.candidates import (
    Candidate as Candidate,
    InfeasibleStrategy as InfeasibleStrategy,
    Profiled as Profiled,
    Result as Result,
    Strategy as Strategy,
    create_pass as create_pass,
    place_on_one_device as place_on_one_device,
    rank_texts as rank_texts,
    set_options as set_options,
)
from onnxplace.driver.choose import (
    Objective as Objective,
    StreamPoint as StreamPoint,
    list_ways as list_ways,
    stream_curve as stream_curve,
)
from onnxplace.driver.compile import (
    compile_model as compile_model,
    compile_with as compile_with,
)
from onnxplace.driver.explaining import DeviceAlternative as DeviceAlternative, Explanation as Explanation
from onnxplace.driver.machine_choice import (
    Goals as Goals,
    MachineRow as MachineRow,
    list_machine_rows as list_machine_rows,
    parse_goals as parse_goals,
    read_prices as read_prices,
)
from onnxplace.driver.place import (
    Grouping as Grouping,
    PlacementResult as PlacementResult,
    apply_target as apply_target,
    evaluate_placement as evaluate_placement,
    place_cost_graph as place_cost_graph,
    read_placement as read_placement,
    replace_devices as replace_devices,
)
from onnxplace.driver.plan import Plan as Plan, PlannedStrategy as PlannedStrategy, plan_model as plan_model
from onnxplace.driver.plan_differences import compare_plans as compare_plans
from onnxplace.driver.settings import (
    CompileSettings as CompileSettings,
    require_one_target as require_one_target,
)
from onnxplace.driver.sources import find_in_folder as find_in_folder
from onnxplace.driver.trials import Compiled as Compiled
