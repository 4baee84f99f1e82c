"""Hold more than fits: weights come in time for the runs that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Original, Placement, Profile, Schedule, Source, Streaming
from onnxplace.graph.op_graph import Floats
from onnxplace.machine.hardware import find_measurement_obstacle
from onnxplace.machine.transfer_rates import find_host_rate, measure_read_rate
from onnxplace.model.lowering import infer_static_shapes
from onnxplace.model.model import Model
from onnxplace.model.tensors import find_external_range
from onnxplace.passes.profiling.streamed_nodes import measure_streamed
from onnxplace.passes.streaming.source_program import MEMORY_MARGIN, choose_sources
from onnxplace.passes.streaming.streamable_weights import StreamableWeights
from onnxplace.passes.streaming.streamed_placement import apply_choice, describe_choice, predict_step
from onnxplace.problem import commit_placement, out_of_memory_error, placement_problem
from onnxplace.state import Pass, State
from onnxplace.target.parsing import parse_bytes

# Sizes of the pool that are tried: shares of the least memory of a device, and multiples of the largest block.
POOL_SHARES, POOL_BLOCKS = (1 / 32, 1 / 16, 1 / 8), (1, 2)
# Assumed where nothing is known.
DISK_BYTES_PER_SECOND = 1.5e9


@dataclass(frozen=True)
class Stream(Pass):
    """Let weights stream that devices have no room for.

    It decides which weights stay on their devices, which ones come to them in time for each run, from the host's memory
    or from disk, and which nodes another device computes instead, such as the host. An integer program minimises the
    predicted step: computing, crossings, and waits where the pool is empty. A note says how far the choice may be from
    the best one. Weights stay first whose nodes lose most with weights as inputs.
    """

    name: ClassVar[str] = "stream"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile)
    provides: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule, Streaming, Original)
    preserves: ClassVar[tuple[type, ...]] = (Groups, Clusters)

    pool: str = ""
    """Memory of each device for weights that have arrived or are on their way; by default the best of some sizes."""
    host: str = ""
    """The host's memory for weights that stream; by default without limit, except for processors, which read theirs
    from disk."""
    always: bool = False
    """Whether all weights stream that can, even where there is room for them."""
    cache: bool = True
    """Use earlier measurements of nodes with weights as inputs, and store new ones."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        if not len(problem.graph):
            nothing = commit_placement(state, problem, np.zeros(0, np.int32), np.zeros(0), self.name)
            return nothing.with_facts(Streaming({}, {}, {}), Original.of(state))
        weights = StreamableWeights(state[Model], state[Profile], problem, {}, 0)
        if not weights.may_stream.any() and problem.graph.total_weight_bytes > problem.limit_bytes.max():
            raise out_of_memory_error(problem, self.name)
        weights = replace(weights, factors=self._find_factors(state, weights))
        if self.pool:
            candidates = [parse_bytes(self.pool)]
        else:
            largest, least = int(weights.block_bytes.max(initial=0)), int(problem.limit_bytes.min())
            sizes = {*(int(share * least) for share in POOL_SHARES), *(count * largest for count in POOL_BLOCKS), 1}
            candidates = sorted(size for size in sizes if size >= (largest if self.always else 1))
        rates, host = self._find_rates(state, weights), float(parse_bytes(self.host)) if self.host else np.inf
        if all(device.is_host for device in state.target.devices):  # they hold the rest in the same memory
            host = max(host - float(state.target.total_bytes), 0.0)
        best: State | None = None
        least_seconds = np.inf
        for divided in problem.divide_pools():
            for pool in candidates if best is None else ():
                after = self._choose(state, replace(weights, problem=divided, pool_bytes=pool), rates, host)
                if after is not None and (seconds := predict_step(after)) < least_seconds:
                    best, least_seconds = after, seconds
        if best is None:
            raise self._describe_shortage(state, weights, rates, host)
        return best

    def _choose(self, state: State, weights: StreamableWeights, rates: Floats, host_bytes: float) -> State | None:
        """Return the state with the best choice for a size of the pool; None if nothing fits."""
        choice = choose_sources(weights.build_problem(rates, host_bytes, always=self.always))
        if choice is None:
            return None
        choice = choice if self.always else weights.hold_small_streams(choice)
        try:
            after = apply_choice(state, weights, choice, rates, self.name)
        except InfeasibleError:  # values of several devices may live longer than on one alone
            return None
        return after.with_notes(describe_choice(after, choice))

    def _find_factors(self, state: State, weights: StreamableWeights) -> dict[str, Floats]:
        model, profile = state[Model], state[Profile]
        reads = profile.graph.weights
        nodes = np.unique(reads.rows[weights.may_stream[reads.items]]).tolist()
        shapes = {**infer_static_shapes(model), **model.input_shapes()}
        devices = state.target.devices
        return measure_streamed(model, profile, devices, nodes, shapes=shapes, types={}, cache=self.cache)

    def _find_rates(self, state: State, weights: StreamableWeights) -> Floats:
        """Return the rates at which weights come, [source, device] in bytes per second."""
        devices, graph = state.target.devices, state[Profile].graph
        host = np.array([find_host_rate(state.target, device) for device in devices])
        keeps = np.array([not device.is_host or bool(self.host) for device in devices])
        disk_rate = DISK_BYTES_PER_SECOND
        names = [graph.weight_names[weight] for weight in np.flatnonzero(weights.may_stream)]
        stored = [tensor for name in names if (tensor := state[Model].initializers[name]).external_data]
        is_measured = any((source == Source.MEASURED).any() for source in state[Profile].sources.values())
        if stored and is_measured and not any(find_measurement_obstacle(device) for device in devices):
            disk_rate = measure_read_rate(find_external_range(stored[0], state[Model].folder)[0])
        return np.stack([np.full(len(devices), np.inf), np.where(keeps, host, 0.0), np.minimum(host, disk_rate)])

    def _describe_shortage(
        self, state: State, weights: StreamableWeights, rates: Floats, host_bytes: float
    ) -> InfeasibleError:
        """Return the error for limits that are too small even for weights that stream."""
        graph, problem = state[Profile].graph, weights.problem
        largest = int(weights.block_bytes.max(initial=0))
        kernel = np.flatnonzero(state[Profile].unit == int(weights.block_bytes.argmax())).tolist()
        name = graph.names[max(kernel, key=lambda node: int(graph.weight_bytes[graph.weights[node]].sum()))]
        node = f"node {name!r}" if len(kernel) == 1 else f"the kernel with node {name!r}"
        if self.pool and parse_bytes(self.pool) < largest:
            wider = replace(weights, pool_bytes=largest)
            if self._choose(state, wider, rates, host_bytes) is not None:
                message = f"the weights of {node} must stream, and have {largest} bytes, more than the pool"
                return InfeasibleError("P066", message, where="--pool", hint=f"--pool {largest} or more")
        devices = range(len(state.target.devices))
        held = np.array([weights.held_by(device)[~weights.may_stream].sum() for device in devices])
        pool = max(largest, parse_bytes(self.pool) if self.pool else 0)
        purpose = "the pool" if pool > largest else f"the weights of {node}"
        needs = np.ceil((weights.value_bytes + held + pool) / (1 - MEMORY_MARGIN))
        device = int((needs - problem.limit_bytes).argmin())
        item = state.target.devices[device]
        message = (
            f"weights cannot stream in so little memory: {item.id} needs at least {int(needs[device])} bytes, of which "
            f"{pool} for {purpose}, and may use {int(problem.limit_bytes[device])}"
        )
        return InfeasibleError("P066", message, where=self.name, hint="raise --max-memory, or add devices")
