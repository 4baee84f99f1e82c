"""The socket to which ranks connect."""

import socket

import pytest

from onnxplace_hosts.ranks import launcher
from onnxplace_hosts.ranks.launcher import RankSocket, connect_rank


def test_a_connection_that_does_not_say_its_rank_is_left_out(monkeypatch):
    """A rank may be stopped before it says it; the driver then waits for the others, at most until its deadline."""
    monkeypatch.setattr(launcher, "_RANK_SECONDS", 0.02)
    with RankSocket() as ranks:
        silent, incomplete = (socket.socket(socket.AF_UNIX) for _ in range(2))
        for connection in (silent, incomplete):
            connection.connect(ranks.path)
        incomplete.sendall(b"\1")
        incomplete.shutdown(socket.SHUT_WR)
        with connect_rank(ranks.path, 3):
            rank, connection = ranks.accept(lambda: None)
            assert (rank, connection.gettimeout()) == (3, None)
            connection.close()

        def give_up():
            raise TimeoutError

        with pytest.raises(TimeoutError):
            ranks.accept(give_up)
        silent.close(), incomplete.close()
