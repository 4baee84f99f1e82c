from onnxplace.simulation.channel_kernels import (
    GAP as GAP,
    book_transfer as book_transfer,
    open_channels as open_channels,
)
from onnxplace.simulation.lower_bounds import (
    heads_and_tails as heads_and_tails,
    lower_bound_seconds as lower_bound_seconds,
    node_bytes as node_bytes,
)
from onnxplace.simulation.simulated_contention import (
    memory_share as memory_share,
    simulate_with_contention as simulate_with_contention,
)
from onnxplace.simulation.simulator import (
    MemoryChanges as MemoryChanges,
    Simulation as Simulation,
    Transfers as Transfers,
    device_weights as device_weights,
    list_memory_changes as list_memory_changes,
    simulate as simulate,
    simulate_stream as simulate_stream,
)
from onnxplace.simulation.steady_state import (
    RequestRates as RequestRates,
    list_transfers as list_transfers,
    predict_python_seconds as predict_python_seconds,
    predict_request_rates as predict_request_rates,
    steady_state_loads as steady_state_loads,
)
from onnxplace.simulation.step_kernels import (
    DEVICE as DEVICE,
    BufferUses as BufferUses,
    EventState as EventState,
    LiveSpans as LiveSpans,
    PlacedGraph as PlacedGraph,
    compute_live_spans as compute_live_spans,
    device_peaks as device_peaks,
    run_events as run_events,
)
from onnxplace.simulation.weight_streams import (
    BLOCK as BLOCK,
    PAGE_BYTES as PAGE_BYTES,
    PoolLayout as PoolLayout,
    WeightStream as WeightStream,
    find_distances as find_distances,
    measure_block as measure_block,
)
