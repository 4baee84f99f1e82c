"""Larger files are hashed while sessions open, and a session exists only if they are right."""

import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

import onnxplace
from onnxplace.bundle import bundle as bundle_module
from onnxplace.bundle.bundle import Bundle, compute_sha256
from onnxplace.errors import BundleError
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from tests.support.endless import endless_bundle, feeds
from tests.support.fuzzing import fuzzed

WEIGHTS, SEGMENT = "segments/weights.bin", "segments/cpu0-000.onnx"


@pytest.fixture
def all_larger(monkeypatch):
    """Leave the hashes of all files to the other thread."""
    monkeypatch.setattr(bundle_module, "MAX_TINY_FILE_BYTES", 0)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def error_of(function):
    try:
        function()
    except BundleError as error:
        return str(error), error.hint
    return None


@pytest.mark.usefixtures("all_larger")
@pytest.mark.parametrize("name", [WEIGHTS, SEGMENT, "segments/whole.onnx", "costs.json"])
def test_a_wrong_hash_is_the_error_of_opening_the_bundle(bundle_copy, name):
    flip(bundle_copy / name)
    error = error_of(lambda: onnxplace.InferenceSession(bundle_copy))
    assert error == error_of(lambda: Bundle.open(bundle_copy))
    assert "SHA-256" in error[0]


@pytest.mark.usefixtures("all_larger")
def test_threads_of_a_session_with_wrong_weights_end(bundle_copy):
    flip(bundle_copy / WEIGHTS)
    before = set(threading.enumerate())
    with pytest.raises(BundleError, match="SHA-256") as raised:
        onnxplace.InferenceSession(bundle_copy)
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    assert raised.value.__traceback__ is not None  # which would keep the session


@pytest.mark.usefixtures("all_larger")
def test_a_session_is_there_only_after_the_hashes(bundle_copy, monkeypatch):
    may_hash, opened = threading.Event(), []

    def hash_late(file):
        assert may_hash.wait(120)
        return compute_sha256(file)

    def open_noted(*arguments, **options):
        opened.append(open_runtime(*arguments, **options))
        return opened[0]

    open_runtime = OnnxRuntime.open
    monkeypatch.setattr(bundle_module, "compute_sha256", hash_late)
    monkeypatch.setattr(OnnxRuntime, "open", open_noted)
    sessions = []
    thread = threading.Thread(target=lambda: sessions.append(onnxplace.InferenceSession(bundle_copy)))
    thread.start()
    while not opened:
        time.sleep(0.01)
    thread.join(0.1)
    assert not sessions
    may_hash.set()
    thread.join(120)
    sessions[0].close()


def test_tiny_files_are_hashed_before_a_session_opens(bundle_copy, monkeypatch):
    flip(bundle_copy / SEGMENT)
    monkeypatch.setattr(OnnxRuntime, "open", lambda *_, **__: pytest.fail("a session of a damaged file"))
    with pytest.raises(BundleError, match="SHA-256"):
        onnxplace.InferenceSession(bundle_copy)


@pytest.mark.usefixtures("all_larger")
def test_weights_that_change_and_change_back_meanwhile_are_refused(bundle_copy):
    def change_and_restore():
        time.sleep(0.05)  # the file system tells times apart
        flip(bundle_copy / WEIGHTS)
        flip(bundle_copy / WEIGHTS)

    with pytest.raises(BundleError, match="changed while it was opened"), Bundle.open_while_hashing(bundle_copy):
        change_and_restore()


@pytest.mark.usefixtures("all_larger")
def test_a_bundle_that_is_removed_meanwhile_is_refused(bundle_copy):
    with pytest.raises(BundleError, match="N001"), Bundle.open_while_hashing(bundle_copy):
        shutil.rmtree(bundle_copy)


@pytest.mark.usefixtures("all_larger")
@pytest.mark.parametrize(("is_right", "kind"), [(True, ZeroDivisionError), (False, BundleError)])
def test_wrong_bytes_explain_another_failure(bundle_copy, is_right, kind):
    if not is_right:
        flip(bundle_copy / WEIGHTS)
    with pytest.raises(kind), Bundle.open_while_hashing(bundle_copy):
        raise ZeroDivisionError


@pytest.mark.usefixtures("all_larger")
def test_an_interrupt_is_not_replaced_by_a_wrong_hash(bundle_copy):
    flip(bundle_copy / WEIGHTS)
    with pytest.raises(KeyboardInterrupt), Bundle.open_while_hashing(bundle_copy):
        raise KeyboardInterrupt


@pytest.mark.usefixtures("all_larger")
def test_other_files_may_come_meanwhile(bundle_copy):
    with Bundle.open_while_hashing(bundle_copy):
        (bundle_copy / "segments" / "new").write_text("of another program")
        (bundle_copy / WEIGHTS).chmod(0o600)


def test_files_are_hashed_in_two_ways_only(bundle_copy):
    with pytest.raises(onnxplace.UsageError, match=r"U001.*'tiny'"):
        Bundle.open(bundle_copy, check="tiny")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A small bundle to damage, a copy of it, and the names of its files that are not empty."""
    bundle = endless_bundle(tmp_path_factory.mktemp("hashing"))
    names = sorted(name for name, record in bundle.manifest.files.items() if record.bytes)
    return bundle.path, shutil.copytree(bundle.path, bundle.path.with_name("copy")), names


@fuzzed
@given(st.data())
def test_sessions_refuse_what_opening_the_bundle_refuses(endless, data):
    """With any limit of tiny files, a damaged file gives the same error, and an undamaged bundle runs."""
    path, original, names = endless
    limit = data.draw(st.integers(0, 3000))
    name = data.draw(st.sampled_from([None, *names]))
    if name is not None:
        content = (original / name).read_bytes()
        place = data.draw(st.integers(0, len(content) - 1))
        damage = data.draw(st.sampled_from(["flip", "cut", "append", "remove"]))
        flipped = bytes([content[place] ^ data.draw(st.integers(1, 255))])
        damaged = {"flip": content[:place] + flipped + content[place + 1 :], "cut": content[:place]}
        (path / name).unlink() if damage == "remove" else (path / name).write_bytes(damaged.get(damage, content + b"x"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bundle_module, "MAX_TINY_FILE_BYTES", limit)
            expected = error_of(lambda: Bundle.open(path))
            assert (expected is None) == (name is None)
            if name is None:
                with onnxplace.InferenceSession(path) as session:
                    assert isinstance(session.run(None, feeds(2))[0], np.ndarray)
            else:
                assert error_of(lambda: onnxplace.InferenceSession(path)) == expected
    finally:
        if name is not None:
            shutil.copy(original / name, path / name)
