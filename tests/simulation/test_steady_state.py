"""Steady-state loads: by hand, and against an obvious loop over values and readers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.simulation.steady_state import list_transfers, steady_state_loads
from onnxplace.target.target import LINK_MODELS
from onnxplace.testing.pass_contract import random_graph, random_target
from tests.support.reference_simulator import even_target, graph_of

thorough = settings(deadline=None, derandomize=True, max_examples=150)


def fork():
    """Return a -> b, c with a value of 3 bytes; b, c -> d with 1 byte each."""
    return graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}, sizes={"a": 3})


SECONDS = np.array([[2.0, 4.0, 5.0, 1.0]] * 3)


def test_a_value_is_sent_once_to_each_device_that_reads_it():
    result = steady_state_loads(fork(), SECONDS, even_target(3, latency=0.5), np.array([0, 1, 2, 1], dtype=np.int32))
    assert result.compute_seconds.tolist() == [2, 5, 5]
    assert result.sent_seconds.tolist() == [7, 0, 1.5]
    assert result.received_seconds.tolist() == [0, 5, 3.5]
    together = steady_state_loads(fork(), SECONDS, even_target(3, latency=0.5), np.array([0, 1, 1, 1], dtype=np.int32))
    assert together.sent_seconds.tolist() == [3.5, 0, 0]


@pytest.mark.parametrize(
    ("link_model", "count", "interval", "largest"),
    [
        ("duplex", "max", 7, (0, "sends")),
        ("sequential", "max", 7, (0, "sends and receives")),
        ("parallel", "max", 5, (1, "computes")),
        ("duplex", "sum", 10, (1, "computes and transfers")),
        ("sequential", "sum", 10, (1, "computes and transfers")),
        ("parallel", "sum", 10, (1, "computes and transfers")),
    ],
)
def test_the_interval_is_the_largest_load(link_model, count, interval, largest):
    target = even_target(3, latency=0.5, link_model=link_model)
    result = steady_state_loads(fork(), SECONDS, target, np.array([0, 1, 2, 1], dtype=np.int32), count)
    assert result.interval_seconds == interval
    assert result.largest == largest


def test_inputs_are_on_all_devices_and_an_empty_graph_has_no_load():
    graph = graph_of({"a": ["x"], "b": ["x"]}, fed=["x"])
    result = steady_state_loads(graph, np.ones((2, 2)), even_target(2), np.array([0, 1], dtype=np.int32))
    assert result.sent_seconds.tolist() == result.received_seconds.tolist() == [0, 0]
    empty = steady_state_loads(graph_of({}), np.ones((2, 0)), even_target(2), np.zeros(0, dtype=np.int32))
    assert empty.interval_seconds == 0


def by_hand(graph, seconds, target, device, count):
    """Return the interval by asking of each value who reads it where."""
    devices = len(target.devices)
    latency, per_byte = target.link_arrays()
    compute, sent, received = [0.0] * devices, [0.0] * devices, [0.0] * devices
    for node, home in enumerate(device):
        compute[home] += seconds[home][node]
    for value, maker in enumerate(graph.producer.tolist()):
        if maker < 0:
            continue
        home = device[maker]
        for there in {device[reader] for reader in graph.readers[value].tolist()} - {home}:
            seconds_taken = latency[home, there] + int(graph.value_bytes[value]) * per_byte[home, there]
            sent[home] += seconds_taken
            received[there] += seconds_taken
    if count == "sum":
        return max(a + b + c for a, b, c in zip(compute, sent, received))
    if target.link_model == "parallel":
        return max(compute)
    if target.link_model == "duplex":
        return max(*compute, *sent, *received)
    return max(*compute, *(a + b for a, b in zip(sent, received)))


@thorough
@given(
    seed=st.integers(0, 2**32 - 1),
    nodes=st.integers(1, 30),
    devices=st.integers(1, 4),
    link_model=st.sampled_from(LINK_MODELS),
    count=st.sampled_from(["max", "sum"]),
)
def test_loads_agree_with_counting_by_hand(seed, nodes, devices, link_model, count):
    graph, target = random_graph(seed, nodes, shuffled=seed % 2 == 1), random_target(seed, devices)
    target = replace(target, link_model=link_model)
    random = np.random.default_rng(seed)
    seconds = random.integers(0, 100, (devices, nodes)) * 2.0**-20
    device = random.integers(0, devices, nodes).astype(np.int32)
    result = steady_state_loads(graph, seconds, target, device, count)
    assert result.interval_seconds == pytest.approx(by_hand(graph, seconds, target, device.tolist(), count))
    value, source, destination = list_transfers(graph, device, devices)
    assert len(set(zip(value.tolist(), destination.tolist()))) == len(value)
    assert (source != destination).all()
