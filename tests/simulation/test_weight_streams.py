"""Weights that stream in simulated time, against rules that are checked run by run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.simulation.simulator import Simulation, simulate, simulate_stream
from onnxplace.simulation.weight_streams import PAGE_BYTES, PoolLayout, WeightStream, find_distances, measure_block
from onnxplace.testing.pass_contract import TICK_SECONDS
from tests.simulation.test_simulate import placed_graphs
from tests.support.reference_simulator import even_target, graph_of

# Times are exact, so that everything is compared for equality.
thorough = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def streams(draw):
    """Draw a placed graph and blocks of some of its nodes."""
    graph, seconds, target, device, order = draw(placed_graphs())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = random.integers(0, 5, len(graph)) * (random.random(len(graph)) < draw(st.sampled_from([0.3, 1.0])))
    pools = {index: draw(st.integers(4, 12)) for index in range(len(target.devices))}
    distances = find_distances(sizes, pools, device, order)
    load_seconds = sizes * draw(st.sampled_from([1, 7, 400])) * TICK_SECONDS
    return graph, seconds, target, device, order, load_seconds, distances


def list_inputs_seconds(graph, device, simulation: Simulation, node: int) -> float:
    """Return when the last input of a node is on its device."""
    sent = simulation.transfers
    times = [0.0]
    for value in graph.inputs[node].tolist():
        producer = int(graph.producer[value])
        if producer >= 0 and device[producer] == device[node]:
            times.append(simulation.finish_seconds[producer])
        elif producer >= 0:
            is_own = (sent.value == value) & (sent.destination == device[node])
            times.append(sent.finish_seconds[is_own].max())
    return float(max(times))


@given(streams())
@thorough
def test_each_node_starts_as_soon_as_its_device_its_inputs_and_its_weights_are_there(case):
    graph, seconds, target, device, order, load_seconds, distances = case
    stream = WeightStream.of(load_seconds, distances, device, order, len(target.devices))
    step = simulate(graph, seconds, target, device, order, stream=stream)
    for index in range(len(target.devices)):
        own, free, loaded, blocks = order[device[order] == index].tolist(), 0.0, -np.inf, []
        for node in own:
            arrival = -np.inf
            if distances[node]:
                position = len(blocks) - int(distances[node])
                freed = step.finish_seconds[blocks[position]] if position >= 0 else -np.inf
                loaded = arrival = max(loaded, freed) + load_seconds[node]
                blocks.append(node)
            assert step.arrival_seconds[node] == arrival
            assert step.start_seconds[node] == max(free, list_inputs_seconds(graph, device, step, node), arrival)
            free = step.finish_seconds[node]


@given(streams())
@thorough
def test_weights_that_take_no_time_change_nothing(case):
    graph, seconds, target, device, order, _, distances = case
    stream = WeightStream.of(np.zeros(len(graph)), distances, device, order, len(target.devices))
    expected = simulate(graph, seconds, target, device, order)
    step = simulate_stream(graph, seconds, target, device, order, stream)
    assert step.finish_seconds.tolist() == expected.finish_seconds.tolist()
    assert step.makespan_seconds == expected.makespan_seconds


def settle(run_seconds: list[float], load_seconds: list[float], sizes: list[int], pool: int) -> Simulation:
    """Simulate a chain on one device in its steady state."""
    count = len(run_seconds)
    graph = graph_of({f"n{node}": [f"n{node - 1}"] if node else [] for node in range(count)})
    target, device, order = even_target(1), np.zeros(count, dtype=np.int32), np.arange(count, dtype=np.int32)
    distances = find_distances(np.array(sizes), {0: pool}, device, order)
    stream = WeightStream.of(np.array(load_seconds), distances, device, order, 1)
    return simulate_stream(graph, np.array([run_seconds]), target, device, order, stream)


def test_a_step_takes_as_long_as_its_weights_where_they_come_more_slowly_than_it_computes():
    step = settle([1.0] * 8, [3.0] * 8, [1] * 8, pool=4)
    assert step.makespan_seconds == 24.0


def test_a_step_takes_as_long_as_it_computes_where_weights_come_in_time():
    assert settle([3.0] * 8, [2.0] * 8, [1] * 8, pool=4).makespan_seconds == 24.0


def test_reading_and_computing_add_up_where_the_pool_has_room_for_one_block_only():
    assert settle([3.0] * 4, [2.0] * 4, [4] * 4, pool=4).makespan_seconds == 20.0


def test_the_next_step_is_read_while_weights_that_stay_are_used():
    # Four seconds of resident weights, in which both blocks of the next step come.
    assert settle([1.0, 1.0, 4.0], [2.0, 2.0, 0.0], [1, 1, 0], pool=2).makespan_seconds == 6.0


def test_blocks_of_whole_pages_are_measured():
    assert measure_block([1, PAGE_BYTES, PAGE_BYTES + 1]) == 4 * PAGE_BYTES


def test_a_block_larger_than_its_pool_is_refused():
    with pytest.raises(ValueError, match="a block of 5 bytes does not fit into a pool of 4"):
        PoolLayout.of([3, 5], 4)


def test_streams_are_not_altered_by_simulations():
    graph, device, order = graph_of({"a": [], "b": ["a"]}), np.zeros(2, dtype=np.int32), np.arange(2, dtype=np.int32)
    stream = WeightStream.of(np.ones(2), np.array([1, 1]), device, order, 1)
    before = replace(stream, blocks=stream.blocks.copy())
    simulate(graph, np.ones((1, 2)), even_target(1), device, order, stream=stream)
    assert stream.blocks.tolist() == before.blocks.tolist()
