"""The lock of providers that are not safe for threads: objects are freed while it is held, whoever drops them."""

import gc
import os
import threading
import weakref

import pytest

from onnxplace.target.provider_lock import ProviderLock

SECONDS = 60.0


class Resource:
    """An object of a provider, which notes whether the lock is held when it is freed."""

    def __init__(self, lock, freed, name=""):
        self.lock, self.freed, self.name = lock, freed, name

    def __del__(self):
        self.freed.append((self.name, self.lock.hold()._is_owned()))


class Handle:
    """What others keep of an object."""

    def __init__(self, lock, *resources):
        self.owned = lock.own(self, *resources)


@pytest.fixture
def lock():
    return ProviderLock()


@pytest.fixture
def freed():
    return []


def new_handle(lock, freed, *names):
    return Handle(lock, *(Resource(lock, freed, name) for name in names or ("only",)))


def test_objects_are_freed_with_the_lock_the_last_one_first(lock, freed):
    handle = new_handle(lock, freed, "session", "value")
    assert freed == []
    del handle
    assert freed == [("value", True), ("session", True)]


def test_a_handle_in_a_cycle_is_freed_with_the_lock(lock, freed):
    handle = new_handle(lock, freed, "session", "value")
    handle.itself = handle
    del handle
    gc.collect()
    assert freed == [("value", True), ("session", True)]


def test_an_exception_keeps_nothing_of_a_call(lock, freed):
    def fail():
        resource = Resource(lock, freed, "local")
        raise ValueError(resource.name)

    with pytest.raises(ValueError, match="local") as failure:
        lock.call(fail)
    assert freed == [("local", True)]
    assert failure.value.__traceback__ is not None


def test_an_exception_keeps_nothing_of_those_that_led_to_it(lock, freed):
    def open_file():
        resource = Resource(lock, freed, "first")
        raise OSError(resource.name)

    def fail():
        try:
            open_file()
        except OSError:
            raise ValueError("second") from None

    with pytest.raises(ValueError, match="second"):
        lock.call(fail)
    assert freed == [("first", True)]


def test_frames_of_an_exception_outside_of_the_call_are_left_alone(lock):
    def fail_outside():
        kept = "a local variable"
        raise OSError(kept)

    def fail():
        raise ValueError("inside")

    def fail_while_handling():
        try:
            fail_outside()
        except OSError:
            lock.call(fail)

    with pytest.raises(ValueError, match="inside") as failure:
        fail_while_handling()
    frame = failure.value.__context__.__traceback__.tb_next.tb_frame
    assert frame.f_locals == {"kept": "a local variable"}


def test_dropping_a_handle_does_not_wait_for_a_call_of_another_thread(lock, freed):
    began, end, handle = threading.Event(), threading.Event(), new_handle(lock, freed)
    thread = threading.Thread(target=lambda: lock.call(lambda: began.set() or end.wait(SECONDS)))
    thread.start()
    assert began.wait(SECONDS)
    del handle  # would hang here
    assert freed == []
    end.set()
    thread.join(SECONDS)
    assert freed == [("only", True)]


def test_dropping_a_handle_in_a_call_frees_its_objects_when_the_call_ends(lock, freed):
    handles = [new_handle(lock, freed)]
    lock.call(handles.clear)
    assert freed == [("only", True)]


def test_calls_may_be_nested(lock, freed):
    handles = [new_handle(lock, freed)]
    assert lock.call(lambda: lock.call(lambda: handles.clear() or "inner")) == "inner"
    assert freed == [("only", True)]


def test_many_threads_that_drop_handles_free_all(lock, freed):
    def drop():
        for _ in range(200):
            handle = new_handle(lock, freed)
            handle.itself = handle
            lock.call(lambda: None)
            del handle

    threads = [threading.Thread(target=drop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    gc.collect()
    assert freed == [("only", True)] * 1600


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_frees_nothing_and_does_not_hang(lock, freed):
    began, end, handle = threading.Event(), threading.Event(), new_handle(lock, freed)

    def hold():
        with lock.hold():
            began.set()
            end.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(SECONDS)
    if not (child := os.fork()):
        reference = weakref.ref(handle)
        del handle
        os._exit(0 if reference() is None and not freed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.set()
    thread.join(SECONDS)
