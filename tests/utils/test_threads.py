"""Jobs in threads stop when the main thread is interrupted, or when one of them fails."""

import signal
import threading

import pytest

from onnxplace.utils.threads import run_in_threads, start_thread


def test_results_come_in_the_order_of_the_jobs():
    second_is_done = threading.Event()

    def finish_last():
        assert second_is_done.wait(120)
        return "first"

    def finish_first():
        second_is_done.set()
        return "second"

    assert run_in_threads([finish_last, finish_first], stop=lambda: None) == ["first", "second"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, ValueError])
def test_a_job_that_fails_stops_the_others(problem, first):
    stopped = threading.Event()

    def fail():
        raise problem

    def wait():
        was_stopped.append(stopped.wait(120))

    was_stopped: list[bool] = []
    with pytest.raises(problem):
        run_in_threads([fail, wait] if first else [wait, fail], stop=stopped.set)
    assert was_stopped == [True]


def test_an_interrupt_while_waiting_stops_all_jobs():
    stopped = threading.Event()

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return stopped.wait(120)

    with pytest.raises(KeyboardInterrupt):
        run_in_threads([interrupt, lambda: stopped.wait(120)], stop=stopped.set)
    assert stopped.is_set()


@pytest.mark.parametrize("in_main", [True, False])
def test_several_threads_are_started_at_once_or_the_failure_is_raised(in_main):
    ran = []

    def start():
        threads = [threading.Thread(target=ran.append, args=(number,)) for number in range(3)]
        start_thread(*threads)
        for thread in threads:
            thread.join()
        with pytest.raises(RuntimeError, match="only be started once"):
            start_thread(threads[0])
        ran.append("refused")

    if in_main:
        start()
    else:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    assert sorted(ran[:3]) == [0, 1, 2]
    assert ran[3:] == ["refused"]
