from onnxplace.evaluation.compare import (
    UNREPEATABLE as UNREPEATABLE,
    ModelComparison as ModelComparison,
    OutputDifference as OutputDifference,
    Speedup as Speedup,
    Timings as Timings,
    compare_outputs as compare_outputs,
    compute_speedup as compute_speedup,
    find_bundle_lineages as find_bundle_lineages,
    find_worst as find_worst,
    list_precisions as list_precisions,
    open_reference as open_reference,
    rounds_to_few_values as rounds_to_few_values,
    time_in_turns as time_in_turns,
)
from onnxplace.evaluation.device_usage import (
    DeviceUsage as DeviceUsage,
    DeviceUse as DeviceUse,
    LinkUse as LinkUse,
    ProcessUse as ProcessUse,
    StreamUse as StreamUse,
    TracedRequests as TracedRequests,
    measure_usage as measure_usage,
)
from onnxplace.evaluation.difference_causes import (
    Explanation as Explanation,
    find_cause as find_cause,
)
from onnxplace.evaluation.host_nodes import report_host_nodes as report_host_nodes
from onnxplace.evaluation.memory_use import (
    MEMORY_RUNS as MEMORY_RUNS,
    Opening as Opening,
    ProcessMemory as ProcessMemory,
    measure_model_opening as measure_model_opening,
    measure_process_memory as measure_process_memory,
)
from onnxplace.evaluation.rate_trial import (
    RateTrial as RateTrial,
    RequestStream as RequestStream,
    apply_rate_trial as apply_rate_trial,
    choose_in_flight as choose_in_flight,
    run_rate_trials as run_rate_trials,
)
from onnxplace.evaluation.size_comparison import (
    Compare as Compare,
    SizeComparison as SizeComparison,
    compare_in_child as compare_in_child,
    compare_other_sizes as compare_other_sizes,
    may_be_rounding as may_be_rounding,
)
from onnxplace.evaluation.step_inputs import (
    StateCarrier as StateCarrier,
    StepInputs as StepInputs,
    choose_step_inputs as choose_step_inputs,
)
from onnxplace.evaluation.trial import (
    Trial as Trial,
    apply_trial as apply_trial,
    find_core_shortage as find_core_shortage,
    find_trial_doubt as find_trial_doubt,
    find_trial_obstacle as find_trial_obstacle,
    is_doubtful as is_doubtful,
    measure_error as measure_error,
    record_trial as record_trial,
    replace_manifest as replace_manifest,
    report_core_shortage as report_core_shortage,
    report_doubt as report_doubt,
    run_trials as run_trials,
)
