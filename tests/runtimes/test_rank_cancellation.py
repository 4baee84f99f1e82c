"""Cancellations that reach a rank while it ends another request."""

from pathlib import Path

import pytest

from onnxplace.runtimes.ranks.frames import Frame
from onnxplace.runtimes.ranks.rank_loop import RankLoop
from tests.support.lone_rank import make_request, open_lone_rank


class MeddledSet(set):
    """A set to which another thread adds while it is read: what comes must not be lost with the set that was read."""

    def __iter__(self):
        yield from list(super().__iter__())
        self.while_read()


@pytest.fixture
def loop(tmp_path: Path) -> RankLoop:
    loop, blocks = open_lone_rank(tmp_path, 2)
    yield loop
    loop.close()
    blocks.close()


def request(serial: int) -> Frame:
    return make_request(serial, 2)


def test_a_cancellation_that_comes_while_another_request_ends_is_kept(loop):
    cancelled = loop._cancelled = MeddledSet()
    cancelled.while_read = lambda: loop.cancel(2)
    report = loop.follow(request(1))
    assert not report.fields["cancelled"]
    assert "y" in report.fields["outputs"]
    cancelled.while_read = lambda: None
    assert loop.follow(request(2)).fields["cancelled"]
    assert not loop.follow(request(3)).fields["cancelled"]


def test_cancellations_of_requests_that_have_ended_are_dropped(loop):
    loop.cancel(1)
    assert loop.follow(request(1)).fields["cancelled"]
    loop.cancel(1)  # it comes late
    assert not loop._cancelled
