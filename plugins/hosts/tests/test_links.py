"""Messages between ranks: threads of this process are the ranks, and memory of this process is their MPI."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from ml_dtypes import bfloat16

import onnxplace
from onnxplace.runtimes.execution.programs import ProgramLoop
from onnxplace_hosts.ranks import links as links_module, rank_loop, rank_process
from onnxplace_hosts.ranks.data_planes import DeviceArray
from onnxplace_hosts.ranks.frames import Frame
from onnxplace_hosts.ranks.links import Links
from onnxplace_hosts.ranks.rank_loop import RankLoop
from onnxplace_hosts.ranks.rank_process import RankProcess
from onnxplace_hosts.ranks.shared_blocks import MIN_SHARED_BYTES, MappedBlocks

pytest.importorskip("mpi4py")
WAIT_SECONDS = 20.0


class Through:
    """A request of MPI."""

    def __init__(self, test: Callable[[], bool] = lambda: True) -> None:
        self.Test = test


class Communicator:
    """What links need of MPI, for threads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.rows, self.messages = size, threading.Barrier(size), {}, {}

    def of(self, rank: int) -> "Communicator":
        """Return it as a rank sees it."""
        twin = object.__new__(Communicator)
        twin.__dict__.update(self.__dict__, rank=rank)
        return twin

    def Idup(self):  # noqa: N802 - the names of MPI
        return self, Through()

    def Get_attr(self, _):  # noqa: N802
        return 100

    def Iallgather(self, mine, every):  # noqa: N802
        self.rows[self.rank] = mine.copy()
        self.barrier.wait(WAIT_SECONDS)
        for rank, row in self.rows.items():
            every[rank] = row
        self.barrier.wait(WAIT_SECONDS)
        return Through()

    def Isend(self, message, rank, tag):  # noqa: N802
        self.messages[self.rank, rank, tag] = bytes(message[0])
        return Through()

    def Irecv(self, message, rank, tag):  # noqa: N802
        def test():
            data = self.messages.pop((rank, self.rank, tag), None)
            if data is not None:
                message[0][:] = np.frombuffer(data, np.uint8)
            return data is not None

        return Through(test)


class Rank:
    """A rank that keeps what it receives."""

    def __init__(self, communicator: Communicator, host: str) -> None:
        self.values, self.frames, self.ended = {}, [], []
        self.links = Links(communicator, host, None, "", self.keep_frame, self.ended.append)
        self.links.on_value = self.keep_value

    def keep_frame(self, source, packed):
        self.frames.append((source, packed.unpack()))

    def keep_value(self, serial, name, array):
        assert (serial, name) not in self.values
        self.values[serial, name] = array

    def await_values(self, count):
        end = time.monotonic() + WAIT_SECONDS
        while len(self.values) < count:
            if not self.links.watch(lambda: len(self.values) >= count):
                self.links.look(0.01)
            assert time.monotonic() < end


def run_ranks(hosts, serve, has_rings=False):
    """Let threads be ranks on hosts; return what each returns."""
    communicator, results, problems = Communicator(len(hosts)), {}, []

    def run(index):
        try:
            rank = Rank(communicator.of(index), hosts[index])
            with closing(rank.links):
                if has_rings:
                    rank.links.open_rings()
                results[index] = serve(rank)
                while len(results) < len(hosts) and not problems:  # what has not left yet still does
                    rank.links.look(0.01)
        except BaseException as problem:  # noqa: BLE001 - the test fails with it
            problems.append(problem)
            communicator.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results


DTYPES = (np.float32, np.int64, np.bool_, np.float16, np.uint8)
SHAPES = ((), (0, 3), (5,), (2, 3), (MIN_SHARED_BYTES // 4,), (70, 300), (1 << 19,))
arrays = st.builds(
    lambda dtype, shape, seed: (np.random.default_rng(seed).random(shape) * 9).astype(dtype),
    st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 9),
)  # fmt: skip


@given(
    st.lists(st.sampled_from(["a", "b"]), min_size=2, max_size=3),
    st.lists(arrays, min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_all_ranks_get_the_values_of_all_others(hosts, values, has_rings):
    def serve(rank):
        own = rank.links.rank
        for serial in range(3):
            for number, array in enumerate(values):
                for other in {*range(len(hosts))} - {own}:
                    rank.links.send_value(other, serial, f"{own} {number} ä", array)
        expected = 3 * len(values) * (len(hosts) - 1)
        rank.await_values(expected)
        return rank.values

    for found in run_ranks(hosts, serve, has_rings).values():
        for (_, name), array in found.items():
            expected = values[int(name.split()[1])]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.flags.aligned
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("has_rings", [False, True])
def test_values_other_than_arrays_of_numbers_arrive_as_they_were(has_rings):
    values = [None, np.array(["a", "ä"], object), [np.ones(3), None], {"k": np.arange(2)}, np.ones(2, bfloat16)]

    def serve(rank):
        for serial, value in enumerate(values):
            rank.links.send_value(1 - rank.links.rank, serial, "v", value)
        rank.await_values(len(values))
        return [rank.values[serial, "v"] for serial in range(len(values))]

    for found in run_ranks(["a", "a"], serve, has_rings).values():
        assert repr(found) == repr(values)


@pytest.mark.parametrize("has_rings", [False, True])
def test_memory_of_values_that_are_dropped_is_used_again(has_rings):
    array = np.ones(MIN_SHARED_BYTES, np.uint8)

    def serve(rank):
        for serial in range(50):
            rank.links.send_value(1 - rank.links.rank, serial, "v", array)
            rank.await_values(serial + 1)
            rank.values = dict.fromkeys(rank.values)  # the first may be overtaken by the second, which takes the ring
        return len(rank.links.blocks._lent) + sum(map(len, rank.links.blocks._free.values()))

    assert max(run_ranks(["a", "a"], serve, has_rings).values()) <= 3


def test_a_value_for_several_ranks_of_a_host_is_written_once():
    array = np.ones(MIN_SHARED_BYTES, np.uint8)

    def serve(rank):
        if rank.links.rank == 0:
            for other in (1, 2):
                rank.links.send_value(other, 0, "v", array)
            return len(rank.links.blocks._lent)
        rank.await_values(1)
        return int(rank.values[0, "v"].sum())

    assert run_ranks(["a"] * 3, serve) == {0: 1, 1: len(array), 2: len(array)}


def test_what_a_ring_has_no_room_for_goes_by_the_socket():
    def serve(rank):
        array = np.full(1000, rank.links.rank, np.float32)
        for serial in range(400):  # 1.6 MB before anybody reads
            rank.links.send_value(1 - rank.links.rank, serial, "v", array)
        rank.await_values(400)
        return all((item == 1 - rank.links.rank).all() for item in rank.values.values())

    assert all(run_ranks(["a", "a"], serve, has_rings=True).values())


def test_ranks_that_cannot_map_each_others_memory_use_the_socket(monkeypatch):
    monkeypatch.setattr(MappedBlocks, "try_probe", lambda self, probe: False)

    def serve(rank):
        rank.links.send_value(1 - rank.links.rank, 0, "v", np.ones(1 << 20, np.uint8))
        rank.await_values(1)
        return int(rank.values[0, "v"].sum()), len(rank.links.blocks._lent)

    assert set(run_ranks(["a", "a"], serve, has_rings=True).values()) == {(1 << 20, 0)}


def test_values_that_mpi_reads_in_the_memory_of_a_device_arrive_as_others(monkeypatch):
    class Tensor(DeviceArray):
        def __init__(self, array):
            self.array, self.shape, self.ndim = array, array.shape, array.ndim
            self.dtype, self.nbytes = array.dtype, array.nbytes

        def __bytes__(self):
            return self.array.tobytes()

    def serve(rank):
        rank.links.send_value(1 - rank.links.rank, 0, "v", Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)))
        rank.await_values(1)
        assert not rank.links.is_sending
        return rank.values[0, "v"].tolist()

    assert run_ranks(["a", "b"], serve) == {0: [[0, 1, 2], [3, 4, 5]], 1: [[0, 1, 2], [3, 4, 5]]}


def test_frames_heartbeats_and_the_end_of_a_rank_are_noticed():
    def serve(rank):
        other = 1 - rank.links.rank
        rank.links.send(other, Frame("clock", {"seconds": 1.5}))
        rank.links.send_heartbeat(other)
        rank.links.silent_seconds[other] = 9.0
        end = time.monotonic() + WAIT_SECONDS
        while not rank.frames or rank.links.silent_seconds[other]:
            rank.links.look(0.01)
            assert time.monotonic() < end
        assert [(source, frame.kind, frame.fields) for source, frame in rank.frames] == [
            (other, "clock", {"seconds": 1.5})
        ]
        if rank.links.rank:
            rank.links._drop(rank.links._peers[0])  # its socket is closed, as by the end of a process
        else:
            while not rank.ended:
                rank.links.look(0.01)
            rank.links.send_value(1, 0, "v", np.ones(3))  # it is gone: nothing happens
        return rank.ended

    assert run_ranks(["a", "a"], serve) == {0: [1], 1: [0]}


@pytest.mark.parametrize("has_rings", [False, True])
def test_the_helper_of_a_rank_that_computes_hears_that_others_are_alive(has_rings):
    def serve(rank):
        other, end = 1 - rank.links.rank, time.monotonic() + WAIT_SECONDS
        rank.links.send_value(other, 0, "v", np.ones(3))  # so that rings are in use
        rank.await_values(1)
        rank.links.silent_seconds[other] = 9.0
        while rank.links.silent_seconds[other]:
            rank.links.send_heartbeat(other)
            rank.links.attend(0.01, lambda: True)
            assert time.monotonic() < end
        rank.links.send_heartbeat(other)  # it may not have begun to listen before
        return True

    assert all(run_ranks(["a", "a"], serve, has_rings).values())


def test_the_helper_moves_what_a_socket_does_not_take_at_once():
    size = 32 << 20

    def serve(rank):
        if rank.links.rank == 0:
            rank.links.send_value(1, 0, "v", np.ones(size, np.uint8))
            assert rank.links.is_sending
            rank.links.call_helper()
            rank.links.attend(0.1, lambda: False)  # the call ends this one, and the main thread is said to look itself
            assert rank.links.is_sending
            end = time.monotonic() + WAIT_SECONDS
            while rank.links.is_sending:
                rank.links.attend(0.1, lambda: True)
                assert time.monotonic() < end
            return size
        rank.await_values(1)
        return int(rank.values[0, "v"].sum())

    assert run_ranks(["a", "b"], serve) == {0: size, 1: size}


@pytest.mark.parametrize("spins", [False, True])
def test_a_rank_that_waits_sleeps_late_after_a_short_wait_and_soon_after_a_long_one(monkeypatch, spins):
    process, now, end, slept = object.__new__(RankProcess), 0.0, 0.0, False

    def look(seconds):
        nonlocal now, slept
        now, slept = max(now + 10e-6, min(end, now + seconds)), slept or seconds > 0

    process.links = SimpleNamespace(
        lock=nullcontext(), is_moving=False, look=look, watch=lambda is_ready: is_ready(), return_blocks=lambda: None
    )
    process._spin_seconds = dict.fromkeys([False, True], rank_process.SPIN_SECONDS)
    monkeypatch.setattr(rank_process, "time", SimpleNamespace(perf_counter=lambda: now))
    sleeps = []
    for seconds in (500e-6, 500e-6, 500e-6, 20e-3, 500e-6, 500e-6):
        end, slept = now + seconds, False
        process.wait(lambda end=end: now >= end, spins)
        sleeps.append(slept)
    assert sleeps == [True, False, False, True, True, False]


def test_the_helper_is_called_for_segments_whose_last_run_took_long(monkeypatch):
    times, called = [0.0], list[str]()
    seconds = {"a": iter([9.0, 0.0, 0.0]), "b": iter([0.0, 9.0, 9.0])}
    loop, bare = object.__new__(RankLoop), SimpleNamespace
    loop._long_segments, loop._links = set(), bare(is_sending=False, call_helper=lambda: called.append(name))

    def run(_, device, segment, *rest):
        times[0] += next(seconds[segment.record.id])

    monkeypatch.setattr(ProgramLoop, "run_segment", run)
    monkeypatch.setattr(rank_loop, "time", bare(perf_counter=lambda: times[0]))
    for name in "ababab":
        loop.run_segment(None, bare(record=bare(id=name)), {}, None)
    assert called == ["a", "b"]


def test_other_processes_that_connect_are_not_taken_for_ranks(monkeypatch):
    connect, strangers = links_module._connect, []

    def connect_after_strangers(card, networks, host):
        for text in (b"", b"hello", b"x" * 100):
            stranger = socket.create_connection(("127.0.0.1", card["port"]))
            strangers.append(stranger)
            with suppress(OSError):  # it may be hung up on already
                stranger.sendall(text)
                stranger.shutdown(socket.SHUT_WR)
        return connect(card, networks, host)

    monkeypatch.setattr(links_module, "_connect", connect_after_strangers)

    def serve(rank):
        rank.links.send_value(1 - rank.links.rank, 0, "v", np.ones(3))
        rank.await_values(1)
        return sorted(rank.links._peers)

    with ExitStack() as stack:
        assert run_ranks(["a", "b"], serve) == {0: [1], 1: [0]}
        for stranger in strangers:
            stack.enter_context(stranger)
            with suppress(ConnectionResetError):  # some of what it sent was not read
                assert stranger.recv(1) == b""


def test_a_host_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(onnxplace.ExecutionError, match=r"(?s)K007.*host node7: no connection: .*refused.*interface"):
        links_module._connect({"addresses": ["127.0.0.1"], "port": port}, [], "node7")


def test_addresses_of_networks_that_both_hosts_have_are_tried_before_those_of_each_host_alone(monkeypatch):
    tried = []

    def refuse(address, timeout):
        tried.append(address[0])
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    networks = [ipaddress.ip_interface(text) for text in ("10.1.0.1/16", "172.17.0.1/16", "127.0.0.1/8")]
    addresses = ["192.168.9.1", "172.17.0.1", "10.1.0.2", "127.0.0.1"]
    with pytest.raises(onnxplace.ExecutionError, match="K007"):
        links_module._connect({"addresses": addresses, "port": 1}, networks, "b")
    assert tried == ["10.1.0.2", "192.168.9.1", "172.17.0.1", "127.0.0.1"]
