"""Sessions in a process of their own: values of all types, options, errors, and the ends of processes."""

import gc
import os
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import psutil
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper

from onnxplace.errors import ExecutionError, ModelError
from onnxplace.machine.hardware import find_device_problem
from onnxplace.machine.isolated_sessions import DeviceProcess, find_processes, open_session
from onnxplace.machine.ort_sessions import create_session_options, describe_session_options, make_session_options
from onnxplace.machine.ort_values import is_native_array, to_ort_value, to_python
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.target import Device
from tests.support.fault_checks import wait_until
from tests.support.faulty_plugin import install_faulty_kind
from tests.support.isolated import list_children

ISOLATED = DeviceAddress("cpu", 0, options={"isolate": "true"})
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS = ["float", "float16", "double", "bool", *INTEGERS]
NUMPY_NAMES = {"float": "float32", "double": "float64"}
FOREIGN = {"bfloat16": "bfloat16", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}


def identity(kind: str, wrap: str = "") -> bytes:
    """Return a model that returns its one input, of an element type of ONNX; `wrap` is seq, or opt."""
    element = TensorProto.DataType.Value(kind.upper())
    make = {"seq": helper.make_sequence_type_proto, "opt": helper.make_optional_type_proto}
    proto = helper.make_tensor_type_proto(element, None)
    proto = make[wrap](proto) if wrap else proto
    x, y = (helper.make_value_info(name, proto) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


@pytest.fixture(scope="module")
def open_identity():
    """Return a function that opens an identity, in the one process of this module, once for each type."""
    sessions = {}

    def open_it(kind, wrap=""):
        if (kind, wrap) not in sessions:
            sessions[kind, wrap] = open_session(identity(kind, wrap), make_session_options(()), ISOLATED)
        return sessions[kind, wrap]

    yield open_it
    sessions.clear()
    gc.collect()  # errors may keep a session
    assert not list_children()


# ------------------------------------------------------------------------------------------------------------- values


@st.composite
def tensors(draw, kinds):
    kind = draw(st.sampled_from(kinds))
    shape = draw(st.lists(st.integers(0, 5), max_size=3)) if draw(st.booleans()) else [draw(st.integers(0, 40_000)), 2]
    random = np.random.default_rng(draw(st.integers(0, 99)))
    numbers = random.integers(0, 8, shape)
    if kind == "string":
        return kind, numbers.astype(str).astype(object)
    name = FOREIGN.get(kind, {"float": "float32", "double": "float64"}.get(kind, kind))
    array = numbers.astype(getattr(ml_dtypes, name) if kind in FOREIGN else name)
    return kind, array.T if draw(st.booleans()) else array


def assert_same(value, expected):
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(value.astype(object), expected.astype(object))


@given(tensors([*NUMBERS, *FOREIGN, "string"]))
@settings(max_examples=120)
def test_tensors_of_all_types_and_sizes_come_back_as_they_are(open_identity, case):
    kind, array = case
    session = open_identity(kind)
    (value,) = session.run(None, {"x": array})
    assert_same(value, array)
    (other,) = session.run_with_ort_values(["y"], {"x": to_ort_value(array)})
    assert_same(to_python(other), array)
    assert_same(value, array)  # the next call did not alter it


@given(st.lists(tensors(["float"]), max_size=3))
@settings(max_examples=20)
def test_sequences_come_back_as_they_are(open_identity, items):
    session, arrays = open_identity("float", "seq"), [array for _, array in items]
    (value,) = session.run(["y"], {"x": arrays})
    for item, array in zip(value, arrays, strict=True):
        assert_same(item, array)


def test_optionals_may_be_absent(open_identity):
    session = open_identity("float", "opt")
    assert session.run(["y"], {"x": None}) == [None]
    (value,) = session.run(["y"], {"x": np.ones(2, np.float32)})
    assert_same(value, np.ones(2, np.float32))


# ------------------------------------------------------------------------------------------------- options and errors


@pytest.mark.parametrize("keeps_order", [False, True])
def test_options_are_the_same_there(keeps_order):
    options = make_session_options((0, 1), "basic", {"session.disable_prepacking": "1"}, keeps_order=keeps_order)
    options.enable_mem_pattern = False
    recipe = properties, entries, _, cores = describe_session_options(options)
    assert describe_session_options(create_session_options(*recipe)) == recipe
    assert cores == (0, 1)
    assert (properties["enable_mem_pattern"], properties["enable_mem_reuse"]) == (False, not keeps_order)
    assert entries["session.disable_prepacking"] == "1"
    for key, value in entries.items():
        assert options.get_session_config_entry(key) == value


def test_a_session_describes_itself_and_profiles_there(open_identity, tmp_path):
    options = make_session_options(())
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = open_session(identity("int8"), options, ISOLATED)
    assert [(item.name, item.type) for item in (*session.get_inputs(), *session.get_outputs())] == [
        ("x", "tensor(int8)"),
        ("y", "tensor(int8)"),
    ]
    assert (session.get_overridable_initializers(), session.get_providers()) == ([], ["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(1, np.int8)})
    assert os.path.dirname(session.end_profiling()) == str(tmp_path)


def test_errors_are_those_of_a_session_in_this_process(open_identity):
    plain = open_session(identity("float"), make_session_options(()))
    wrong = {"x": np.zeros(1, np.int8)}
    with pytest.raises(Exception, match="Unexpected input data type") as expected:
        plain.run(None, wrong)
    with pytest.raises(type(expected.value)) as caught:
        open_identity("float").run(None, wrong)
    assert str(caught.value) == str(expected.value)
    with pytest.raises(ModelError, match=r"M002.*here: not an ONNX file"):
        open_session(b"nonsense", make_session_options(()), ISOLATED, "here")


# ----------------------------------------------------------------------------------------------------------- processes


def test_sessions_of_a_device_share_a_process_which_ends_with_them():
    address = DeviceAddress("cpu", 1, options={"isolate": "true"})
    before = set(list_children())
    first, second = (open_session(identity(kind), make_session_options(()), address) for kind in ("float", "int8"))
    assert len(set(list_children()) - before) == 1
    del first
    assert_same(second.run(None, {"x": np.ones(1, np.int8)})[0], np.ones(1, np.int8))
    del second
    assert set(list_children()) == before


def test_a_process_with_an_owner_is_its_own_and_is_opened_again():
    before = list_children()
    addresses = [DeviceAddress("cpu", 0, owner=name) for name in ("first", "second")]
    sessions = [open_session(identity("float"), make_session_options(()), address) for address in addresses]
    processes = [find_processes(address.owner) for address in addresses]
    assert [len(found) for found in (*processes, find_processes(""), find_processes("third"))] == [1, 1, 0, 0]
    (first,), (second,) = processes
    for _ in range(2):
        first._child.kill()
        (value,) = sessions[0].run(None, {"x": np.ones(3, "f4")})  # it was noticed before this run
        assert value.tolist() == [1, 1, 1]
    assert (first.is_open, first.death_count, first.last_failure) == (True, 2, "the process of cpu:0 ended: SIGKILL")
    assert (second.is_open, second.death_count) == (True, 0)
    for session in sessions:
        session.close()
    assert list_children() == before


def test_a_process_is_not_opened_again_with_other_files(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(identity("float"))
    session = open_session(path, make_session_options(()), DeviceAddress("cpu", 0, owner="files"))
    (process,) = find_processes("files")
    times = path.stat()
    path.write_bytes(path.read_bytes())  # as `compile --force` does, which open sessions do not mind
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert session.run(None, {"x": np.ones(1, "f4")})[0].tolist() == [1]
    process._child.kill()
    for _ in range(2):
        with pytest.raises(ExecutionError, match=r"X017.*m.onnx: a process that ended is not opened again: files of"):
            session.run(None, {"x": np.ones(1, "f4")})
    session.close()


def test_the_process_ends_if_this_one_is_killed():
    script = """
import psutil, sys
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.utils.ort import build_one_node_model
address = DeviceAddress("cpu", 0, options={"isolate": "true"})
session = open_session(build_one_node_model(), make_session_options(()), address)
print(psutil.Process().children()[0].pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.fixture
def faulty_address(tmp_path, monkeypatch):
    """The address of an isolated device of a plugin."""
    with install_faulty_kind(tmp_path, monkeypatch):
        yield DeviceAddress("faulty", 0, options={"isolate": "true"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "reason"), [("opening", "SIGSEGV"), ("leaving", "the firmware of the device is too old")]
)
def test_a_crash_while_a_session_is_opened_is_an_error(faulty_address, monkeypatch, fault, reason):
    gc.collect()  # errors of an earlier test may keep a session
    monkeypatch.setenv("FAULTY_DEVICE", fault)
    with pytest.raises(ExecutionError) as caught:
        open_session(identity("float"), make_session_options(()), faulty_address, "segment a-000")
    assert (caught.value.code, caught.value.where) == ("X016", "faulty:0")
    assert caught.value.message == f"segment a-000 failed: the process of this device ended: {reason}"
    monkeypatch.delenv("FAULTY_DEVICE")
    session = open_session(identity("float"), make_session_options(()), faulty_address)
    assert_same(session.run(None, {"x": np.ones(1, np.float32)})[0], np.ones(1, np.float32))


def test_a_crash_while_a_device_is_looked_for_is_an_error(faulty_address, monkeypatch):
    device = Device("faulty:0", 1, options=faulty_address.options)
    assert find_device_problem(device) is None
    monkeypatch.setenv("FAULTY_DEVICE", "looking")
    with pytest.raises(ExecutionError, match=r"X004.*faulty:0: the search for it failed.*SIGSEGV"):
        find_device_problem(device)


def unreadable(_: object) -> object:
    return Unreadable()


class Unreadable:
    """A value that can be sent, and not received."""

    def __reduce__(self):
        return int, ("no number",)


def test_an_answer_that_cannot_be_read_is_an_error():
    session = open_session(
        identity("float"), make_session_options(()), DeviceAddress("cpu", 3, options=ISOLATED.options)
    )
    with pytest.raises(ExecutionError, match="X016"):
        session.call(unreadable)


def test_a_process_that_does_not_answer_is_killed_with_an_interrupted_call(monkeypatch):
    monkeypatch.setattr("onnxplace.machine.isolated_sessions.STOP_SECONDS", 0.1)
    before, address = set(list_children()), DeviceAddress("cpu", 2, options=ISOLATED.options)
    session = open_session(identity("float"), make_session_options(()), address)
    (process,) = set(list_children()) - before
    process.suspend()

    def interrupt(self, options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeviceProcess, "_await_answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.run(None, {"x": np.zeros(1, np.float32)})
    with pytest.raises(ExecutionError, match=r"X016.*it was killed, as a run did not end within 0.1 s"):
        session.run(None, {"x": np.zeros(1, np.float32)})
    assert not process.is_running()


@pytest.mark.parametrize("kind", NUMBERS)
def test_results_of_the_process_are_of_numpy_s_own_types(open_identity, kind):
    (result,) = open_identity(kind).run(["y"], {"x": np.ones(3, NUMPY_NAMES.get(kind, kind))})
    assert is_native_array(result)


def test_an_array_that_became_an_ort_value_outlives_it():
    array = np.random.default_rng(0).random(1 << 16, dtype=np.float32)
    reference, copy = weakref.ref(array), array.copy()
    result = to_python(to_ort_value(array))
    del array
    gc.collect()
    assert reference() is not None, "the result would read freed memory"
    np.testing.assert_array_equal(result, copy)
