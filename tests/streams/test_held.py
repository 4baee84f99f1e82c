"""Values that are dropped while their copies are in flight: nothing is freed or reused before the copies are over.

Work is executed only where something waits for it, so a copy is in flight until then.
"""

import gc

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.runtimes.execution.stream_memory import SessionPlaces
from onnxplace.target.device_kinds import DeviceAddress
from tests.support.fake_streams import FakeDriver, FakeMemory, use_fake_driver

SIZE = 16
SUM = f"""
<ir_version: 8, opset_import: ["" : 17]>
sum (float[{SIZE}] a, float[{SIZE}] b) => (float[{SIZE}] c) {{ c = Add(a, b) }}
"""


@pytest.fixture(params=[True, False], ids=["peer", "host"])
def driver(request):
    with use_fake_driver(FakeDriver(3, request.param, eagerness=0.0, has_places=False)) as driver:
        yield driver


def open_memory(name, host_inputs=()):
    """Return the memory of a device, and a function that enqueues a sum of two values there."""
    memory = FakeMemory(DeviceAddress.of(name), ())
    session = open_session(parser.parse_model(SUM).SerializeToString(), make_session_options([0]), memory.address)
    memory.find_places = lambda session, name: SessionPlaces(name, frozenset(host_inputs))
    memory.adopt(session, "segment sum")

    def add(first, second):
        (value,) = memory.run(session, {"a": first, "b": second}, ["c"], (), None)
        return value

    return memory, add


def make_array(number):
    return np.full(SIZE, number, "f4")


def feed(memory, number):
    return memory.feed(make_array(number), "tensor(float)")


def test_a_download_that_is_dropped_keeps_its_buffer_until_its_copy_is_over(driver):
    memory, add = open_memory("fake:0")
    value = add(feed(memory, 1), feed(memory, 2))
    memory.send(value, None)  # the caller has gone
    result = add(feed(memory, 10), feed(memory, 20))
    np.testing.assert_array_equal(memory.read(memory.send(result, None)), make_array(30))


def test_a_download_keeps_its_value_until_its_copy_is_over(driver):
    memory, add = open_memory("fake:0")
    sent = memory.send(add(feed(memory, 1), feed(memory, 2)), None)
    add(feed(memory, 10), feed(memory, 20))
    memory.computing.last_mark().synchronize()  # the later run, not the copy
    np.testing.assert_array_equal(memory.read(sent), make_array(3))


def test_a_value_that_was_sent_is_kept_until_its_copy_is_over(driver):
    (first, add), (second, add_second) = open_memory("fake:0"), open_memory("fake:1")
    value = second.receive(first.send(add(feed(first, 1), feed(first, 2)), second), first)
    add(feed(first, 10), feed(first, 20))
    first.computing.last_mark().synchronize()
    result = add_second(value, feed(second, 5))
    np.testing.assert_array_equal(second.read(second.send(result, None)), make_array(8))


def test_a_buffer_of_the_host_is_kept_until_both_copies_through_it_are_over(driver):
    (first, add), (second, add_second) = open_memory("fake:0"), open_memory("fake:1")
    value = second.receive(first.send(add(feed(first, 1), feed(first, 2)), second), first)
    first.outgoing.finish()  # the first copy, not the second one
    result = add_second(value, feed(second, 5))
    np.testing.assert_array_equal(second.read(second.send(result, None)), make_array(8))


def test_a_received_value_that_is_not_used_is_freed_after_its_copy(driver):
    (first, add), (second, add_second) = open_memory("fake:0"), open_memory("fake:1")
    second.receive(first.send(add(feed(first, 1), feed(first, 2)), second), first)
    result = add_second(feed(second, 10), feed(second, 20))
    np.testing.assert_array_equal(second.read(second.send(result, None)), make_array(30))
    # A run of the receiver is over, the copy may not be: the fixture finds a copy into memory that was freed.


def test_an_uploaded_value_whose_run_never_came_is_freed_after_its_copy(driver):
    memory, add = open_memory("fake:0")
    driver.memory_limit = 4 * SIZE
    with pytest.raises(onnxplace.ExecutionError, match="X010"):
        add(feed(memory, 1), feed(memory, 2))
    gc.collect()
    driver.memory_limit = None
    result = add(feed(memory, 10), feed(memory, 20))
    memory.computing.last_mark().synchronize()
    np.testing.assert_array_equal(memory.read(memory.send(result, None)), make_array(30))


def test_a_shared_value_is_kept_until_the_run_of_the_other_logical_device_is_over(driver):
    (first, add), (second, add_second) = open_memory("fake:0/0"), open_memory("fake:0/1")
    value = second.receive(first.send(add(feed(first, 1), feed(first, 2)), second), first)
    result = add_second(value, feed(second, 5))
    del value
    add(feed(first, 10), feed(first, 20))
    first.computing.last_mark().synchronize()
    np.testing.assert_array_equal(second.read(second.send(result, None)), make_array(8))


def test_a_feed_is_kept_until_the_run_that_reads_it_on_the_host_is_over(driver):
    memory, add = open_memory("fake:0", host_inputs=("a", "b"))
    result = add(feed(memory, 1), feed(memory, 2))
    gc.collect()
    np.testing.assert_array_equal(memory.read(memory.send(result, None)), make_array(3))


def test_a_closed_memory_has_no_work_in_flight(driver):
    memory, add = open_memory("fake:0")
    add(feed(memory, 1), feed(memory, 2))
    memory.close()
    gc.collect()
    assert not any(driver.used_bytes.values())
    assert driver.counts["free_host"] == driver.counts["allocate_host"]
