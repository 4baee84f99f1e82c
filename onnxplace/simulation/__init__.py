"""Simulated time and memory of a placed graph, and lower bounds on them."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.simulation.contention import contended as contended
    from onnxplace.simulation.lower_bounds import (
        lower_bound_seconds as lower_bound_seconds,
        node_bytes as node_bytes,
        reach as reach,
    )
    from onnxplace.simulation.simulator import (
        Simulation as Simulation,
        device_weights as device_weights,
        simulate as simulate,
    )
    from onnxplace.simulation.steady_state import (
        crossings as crossings,
        loads as loads,
        simulated_loads as simulated_loads,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "contention": "contended",
        "lower_bounds": "lower_bound_seconds node_bytes reach",
        "simulator": "Simulation device_weights simulate",
        "steady_state": "crossings loads simulated_loads",
    },
)
