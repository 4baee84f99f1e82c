from onnxplace.simulation.batch_kernels import (
    BatchGraph as BatchGraph,
    BatchScratch as BatchScratch,
    MemoryScratch as MemoryScratch,
    peak_bytes_of_one as peak_bytes_of_one,
    simulate_one as simulate_one,
)
from onnxplace.simulation.batch_simulator import (
    BatchSimulator as BatchSimulator,
    BatchSteps as BatchSteps,
    new_batch_scratch as new_batch_scratch,
    new_memory_scratch as new_memory_scratch,
)
from onnxplace.simulation.lower_bounds import (
    heads_and_tails as heads_and_tails,
    lower_bound_seconds as lower_bound_seconds,
    node_bytes as node_bytes,
)
from onnxplace.simulation.simulated_contention import simulate_with_contention as simulate_with_contention
from onnxplace.simulation.simulator import (
    MemoryChanges as MemoryChanges,
    Simulation as Simulation,
    Transfers as Transfers,
    device_weights as device_weights,
    list_memory_changes as list_memory_changes,
    simulate as simulate,
)
from onnxplace.simulation.steady_state import (
    RequestRates as RequestRates,
    list_transfers as list_transfers,
    predict_python_seconds as predict_python_seconds,
    predict_request_rates as predict_request_rates,
    steady_state_loads as steady_state_loads,
)
