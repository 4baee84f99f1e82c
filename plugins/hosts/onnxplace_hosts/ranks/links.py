"""Messages from rank to rank: a stream socket for each pair of ranks.

Ranks of one host have Unix sockets. There a large value is written once, into a block of shared memory, and the
receiver reads it where it is; only its description goes through the socket. Ranks of different hosts have TCP
connections. A rank's own thread reads all its sockets, and the driver's, when it waits; a helper does while it computes
for long. What a socket does not take at once is sent later, by whichever thread looks next.

MPI starts the ranks, and tells them each other's addresses. It also carries values that it reads in the memory of a
device, see data_planes.py.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.errors import ExecutionError
from onnxplace.machine.ort_values import is_native_array
from onnxplace_hosts.ranks.data_planes import DeviceArray, MpiBodies, wait_idly
from onnxplace_hosts.ranks.frames import (
    BETWEEN_RANKS,
    Frame,
    FrameSocket,
    PackedFrame,
    decode_value,
    encode_fields,
    encode_value,
    flatten,
)
from onnxplace_hosts.ranks.launcher import RankSocket, connect_rank, read_exactly
from onnxplace_hosts.ranks.shared_blocks import MappedBlocks, SharedBlock, SharedBlocks

if TYPE_CHECKING:
    from onnxplace_hosts.ranks.rings import Board, RingReader, RingWriter

# The first byte of messages that are not JSON: a value, blocks that are given back, a heartbeat, and where the board
# and the ring of the sender are.
_VALUE, _RETURNED, _ALIVE, _RING = 1, 2, 3, 4
# How the bytes of an array travel: in the same text, as a buffer, in a block of shared memory, or by MPI. Other values
# are encoded as in frames.
_WITHIN, _BEHIND, _SHARED, _BY_MPI, _ENCODED = 0, 1, 2, 3, 4
# Kind, way, number of the request, and length of the description, which follows. Then come the bytes within, or two
# numbers: descriptor and size of a block, or tag of MPI and 0.
_HEADER, _PLACE = struct.Struct("<BBqI"), struct.Struct("<qq")
_MAX_WITHIN_BYTES = 16 << 10
_MAX_DESCRIPTIONS = 1 << 10
DRIVER = -1
# A thread that was held up counts as at most this much silence of others.
MAX_STEP_SECONDS = 0.5
# Values by MPI are looked for that often.
BODY_SECONDS = 50e-6


@dataclass
class Peer:
    """Another rank, or the driver."""

    rank: int
    socket: FrameSocket
    blocks: MappedBlocks = field(default_factory=MappedBlocks)
    """Its memory as seen here."""
    shares: bool = False
    """Whether it can map blocks of this rank."""
    ring: SharedBlock | None = None
    """Memory of the ring for what this rank sends to it."""
    places: Sequence[int] = ()
    """Where it has its board and the ring for what it sends; empty until it has told."""
    writer: RingWriter | None = None
    reader: RingReader | None = None


class Links:
    """The messages of one rank. Any thread may send; see `look` and `attend` for who receives.

    Args:
        communicator: A communicator of MPI.
        host: The host of this rank; ranks of one host share memory.
        driver: The socket of the driver, if this rank has one.
        interface: The network interface for messages between hosts; empty for any.
        on_frame: Called with the rank that sent a frame, or DRIVER, under the lock.
        on_end: Called with a rank whose socket has ended, or DRIVER.

    Raises ExecutionError if another host cannot be reached.
    """

    def __init__(
        self,
        communicator: Any,
        host: str,
        driver: FrameSocket | None,
        interface: str,
        on_frame: Callable[[int, PackedFrame], None],
        on_end: Callable[[int], None],
    ) -> None:
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.lock = threading.RLock()
        """Guards all sockets."""
        self.blocks = SharedBlocks()
        self.on_value: Callable[[int, str, Any], None] = lambda *_: None
        """Called with the number of a request, a name and a value, under the lock."""
        self.silent_seconds = [0.0] * self.size
        """Time since the last message of each rank."""
        self._aged = time.monotonic()
        self._on_frame, self._on_end = on_frame, on_end
        self._bodies = MpiBodies(communicator)
        self._sending: set[int] = set()
        """Ranks whose sockets have not taken everything."""
        self._lent: tuple[int, str, SharedBlock] | None = None
        """The value that was last written to a block: others may get the same."""
        self._board: Board | None = None
        self._boards: list[SharedBlock] = []
        """Memory of the board and of the rings to which this rank writes."""
        self._readers: list[Peer] = []
        self._pauses = 0
        self._called, self._caller = os.pipe()
        os.set_blocking(self._called, False)
        os.set_blocking(self._caller, False)
        self._peers = connect_ranks(self._bodies.communicator, host, interface, self.blocks)
        if driver is not None:
            self._peers[DRIVER] = Peer(DRIVER, driver)
        self._by_descriptor = {peer.socket.descriptor: peer for peer in self._peers.values()}
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    # -- sending ------------------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame | PackedFrame) -> None:
        """Begin to send a frame to another rank, or to the driver; does nothing if it has ended."""
        self._push(rank, frame.pack() if isinstance(frame, Frame) else frame)

    def send_value(self, rank: int, serial: int, name: str, value: Any) -> None:
        """Begin to send a value.

        Args:
            rank: The receiver.
            serial: Number of the request.
            name: Name of the value.
            value: An object for frames, or a DeviceArray, which MPI reads where it is. It must not be altered any more.
        """
        if (peer := self._peers.get(rank)) is None:  # it has ended
            return
        way, rest = _ENCODED, b""
        buffers: list[Any] = []
        if isinstance(value, DeviceArray):
            with self.lock:
                way, rest = _BY_MPI, _PLACE.pack(self._bodies.send(rank, value), 0)
        elif is_native_array(value):
            if value.nbytes <= _MAX_WITHIN_BYTES:
                way, rest = _WITHIN, value.tobytes()
            elif peer.shares and (block := self._lend(serial, name, value)) is not None:
                way, rest = _SHARED, _PLACE.pack(block.descriptor, block.size)
            else:
                way, buffers = _BEHIND, [flatten(value)]
        if way == _ENCODED:
            description = encode_fields([name, encode_value(value, buffers)]).encode()
        else:
            description = _describe(name, value.dtype, value.shape)
        header = _HEADER.pack(_VALUE, way, serial, len(description))
        self._return_blocks(peer)
        self._push_for_main(peer, b"".join((header, description, rest)), buffers)

    def _lend(self, serial: int, name: str, array: Any) -> SharedBlock | None:
        """Return a block with an array that was lent, None if it is small; several ranks read the same block."""
        if self._lent is not None and self._lent[:2] == (serial, name) and self.blocks.lend_again(self._lent[2]):
            return self._lent[2]
        block = self.blocks.lend(flatten(array))
        self._lent = None if block is None else (serial, name, block)
        return block

    def return_blocks(self) -> None:
        """Give back to all ranks what they have lent."""
        for peer in tuple(self._peers.values()):
            self._return_blocks(peer)

    def _return_blocks(self, peer: Peer) -> None:
        """Give back what a peer has lent and nothing here refers to."""
        if descriptors := peer.blocks.take_returned():
            self._push_for_main(peer, struct.pack(f"<B{len(descriptors)}q", _RETURNED, *descriptors))

    def send_heartbeat(self, rank: int) -> None:
        """Tell a rank that this one is alive."""
        self._push(rank, PackedFrame(BETWEEN_RANKS, bytes((_ALIVE,))))

    def _push(self, rank: int, frame: PackedFrame) -> None:
        with self.lock:
            if (peer := self._peers.get(rank)) is None:
                return
            try:
                is_sent = peer.socket.push(frame)
            except OSError:
                self._drop(peer)
                return
            if not is_sent:
                self._sending.add(rank)
                self._poll.modify(peer.socket.descriptor, select.POLLIN | select.POLLOUT)

    def _push_for_main(self, peer: Peer, text: bytes, buffers: Sequence[Any] = ()) -> None:
        """Begin to send what only the main thread of a peer needs: by its ring if that has room."""
        with self.lock:
            if peer.writer is None or buffers or (sleeps := peer.writer.put(text)) is None:
                self._push(peer.rank, PackedFrame(BETWEEN_RANKS, text, buffers))
            elif sleeps:
                self.send_heartbeat(peer.rank)  # anything wakes it

    def open_rings(self) -> None:
        """Exchange small messages with ranks of this host by memory from now on; all of them have to call it."""
        sharing = [peer for peer in self._peers.values() if peer.shares and peer.blocks.is_mapped]
        if not sharing:
            return
        from onnxplace_hosts.ranks.rings import RING_BYTES, Board

        with self.lock:
            own = SharedBlock(Board.count_bytes(self.size))
            self._boards, self._board = [own], Board(own.memory)
            self._pauses = self._board.count_pauses()
            for peer in sharing:
                ring = SharedBlock(RING_BYTES)
                self._boards.append(ring)
                places = struct.pack("<B4q", _RING, own.descriptor, own.size, ring.descriptor, ring.size)
                self._push(peer.rank, PackedFrame(BETWEEN_RANKS, places))
                peer.ring = ring
                self._join(peer)

    def _join(self, peer: Peer) -> None:
        """Use rings with a peer once both sides have told each other where they are."""
        if self._board is None or peer.ring is None or not peer.places:
            return
        from onnxplace_hosts.ranks.rings import Board, RingReader, RingWriter, map_block

        board, board_size, ring, ring_size = peer.places
        peer.writer = RingWriter(peer.ring, Board(map_block(peer.blocks.owner, board, board_size)), self.rank)
        peer.reader = RingReader(map_block(peer.blocks.owner, ring, ring_size), self._board, peer.rank)
        self._readers.append(peer)

    @property
    def shares_memory(self) -> bool:
        """Return whether another rank can map memory of this one."""
        return any(peer.shares for peer in self._peers.values())

    @property
    def is_sending(self) -> bool:
        """Return whether messages have not left."""
        return bool(self._sending) or self._bodies.is_moving

    @property
    def is_moving(self) -> bool:
        """Return whether a message has begun to leave or to arrive."""
        return self._bodies.is_moving or any(peer.socket.is_moving for peer in tuple(self._peers.values()))

    # -- receiving ------------------------------------------------------------------------------------

    def look(self, seconds: float) -> None:
        """Take what is here, or what arrives first within so many seconds; for the main thread."""
        end, sleeps = time.monotonic() + seconds, seconds > 0 and self._board is not None
        if self._board is not None:
            if sleeps:
                self._board.show_sleep(1)  # before the last look at the rings, so that no message is missed
            if self._take_rings():
                seconds = 0.0
        try:
            while True:
                is_moving = self._bodies.is_moving
                ready = self._poll.poll(0 if is_moving else seconds * 1e3)
                if ready or is_moving:
                    with self.lock:
                        self._take(ready)
                if ready or not is_moving or self._bodies.has_arrived or time.monotonic() > end:
                    return
                time.sleep(BODY_SECONDS)
        finally:
            if self._board is not None and sleeps:
                self._board.show_sleep(-1)

    def watch(self, is_ready: Callable[[], bool]) -> bool:
        """Take messages from memory until something is ready, or none comes for a while; return whether it is ready.

        It does not hold the interpreter's lock.
        """
        while not (is_over := is_ready()) and self._board is not None and self._board.watch(self._pauses):
            self._take_rings()
        return is_over

    def _take_rings(self) -> bool:
        """Take what is in the rings; return whether that is anything."""
        found = False
        for peer in self._readers:
            assert peer.reader is not None
            if texts := peer.reader.take():
                found, self.silent_seconds[peer.rank] = True, 0.0
                with self.lock:
                    for text in texts:
                        self._accept(peer, text)
        return found

    def attend(self, seconds: float, is_computing: Callable[[], bool]) -> None:
        """Take what arrives while the main thread computes, until it is called or time is over; for the helper."""
        poll = select.poll()
        poll.register(self._called, select.POLLIN)
        if is_computing():
            with self.lock:
                for descriptor, peer in self._by_descriptor.items():
                    poll.register(descriptor, select.POLLIN | (select.POLLOUT if peer.rank in self._sending else 0))
            if self._bodies.is_moving:
                seconds = min(seconds, 4 * BODY_SECONDS)
        ready = poll.poll(seconds * 1e3)
        with self.lock:
            if is_computing():  # else the main thread looks itself
                self._take(ready)
        with suppress(BlockingIOError):  # it was not called
            os.read(self._called, 1 << 10)

    def call_helper(self) -> None:
        """Let `attend` return, so that it is called again and sees what has changed."""
        with suppress(BlockingIOError):  # there are calls already
            os.write(self._caller, b"\0")

    def _take(self, ready: Sequence[tuple[int, int]]) -> None:
        """Send what is left, and take what is here, of sockets that are ready."""
        for descriptor, events in ready:
            if (peer := self._by_descriptor.get(descriptor)) is None:
                continue
            try:
                if events & select.POLLOUT and peer.socket.flush():
                    self._sending.discard(peer.rank)
                    self._poll.modify(descriptor, select.POLLIN)
                if events & ~select.POLLOUT:
                    frames = peer.socket.read()
                    if peer.rank != DRIVER:
                        self.silent_seconds[peer.rank] = 0.0
                    for frame in frames:
                        if peer.rank == DRIVER or frame.text[0] > _RING:
                            self._on_frame(peer.rank, frame)
                        else:
                            self._accept(peer, frame.text, frame.buffers)
            except (EOFError, OSError):
                self._drop(peer)
        self._bodies.progress()

    def _accept(self, peer: Peer, text: bytes, buffers: Sequence[Any] = ()) -> None:
        """Take a message of another rank that is not JSON."""
        if (kind := text[0]) == _VALUE:
            self._accept_value(peer, text, buffers)
        elif kind == _RETURNED:
            self.blocks.give_back(struct.unpack_from(f"<{len(text) // 8}q", text, 1))
        elif kind == _RING:
            peer.places = struct.unpack_from("<4q", text, 1)
            self._join(peer)

    def _accept_value(self, peer: Peer, text: bytes, buffers: Sequence[Any]) -> None:
        _, way, serial, length = _HEADER.unpack_from(text)
        end = _HEADER.size + length
        if way == _ENCODED:
            name, description = json.loads(text[_HEADER.size : end])
            self.on_value(serial, name, decode_value(description, iter(buffers)))
            return
        name, dtype, shape, size = _parse_description(text[_HEADER.size : end])
        if way == _WITHIN:
            self.on_value(serial, name, np.ndarray(shape, dtype, text, end).copy())
            return
        if way == _BEHIND:
            body = buffers[0]
        else:
            place, block_size = _PLACE.unpack_from(text, end)
            body = peer.blocks.borrow(place, block_size, size) if way == _SHARED else np.empty(size, np.uint8)
        array = body.view(dtype).reshape(shape)
        if way == _BY_MPI:
            self._bodies.receive(peer.rank, place, body, lambda: self.on_value(serial, name, array))
        else:
            self.on_value(serial, name, array)

    def _drop(self, peer: Peer) -> None:
        """Forget a peer whose socket has ended: who watches all ranks says why."""
        if self._peers.pop(peer.rank, None) is not None:
            self._sending.discard(peer.rank)
            self._by_descriptor.pop(peer.socket.descriptor)
            self._poll.unregister(peer.socket.descriptor)
            peer.socket.close()
            self._on_end(peer.rank)

    def add_silence(self) -> None:
        """Add the time since the last call to the silence of all ranks."""
        now = time.monotonic()
        elapsed, self._aged = min(now - self._aged, MAX_STEP_SECONDS), now
        for rank in range(self.size):
            self.silent_seconds[rank] += elapsed

    def close(self) -> None:
        """Close the sockets of other ranks, and free shared memory; nothing may be called any more."""
        with self.lock:
            for peer in list(self._peers.values()):
                if peer.rank != DRIVER:
                    self._by_descriptor.pop(peer.socket.descriptor)
                    self._poll.unregister(peer.socket.descriptor)
                    self._peers.pop(peer.rank).socket.close()
            os.close(self._called)
            os.close(self._caller)
            for block in self._boards:
                block.close()
            self.blocks.close()


# Requests have the same values, so that most descriptions were made, and parsed, before.


@lru_cache(_MAX_DESCRIPTIONS)
def _describe(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a description of an array as JSON."""
    return encode_fields([name, dtype.name, shape]).encode()


@lru_cache(_MAX_DESCRIPTIONS)
def _parse_description(text: bytes) -> tuple[str, np.dtype[Any], tuple[int, ...], int]:
    """Return the name, the element type, the shape and the number of bytes of an array."""
    name, code, shape = json.loads(text)
    return name, np.dtype(code), tuple(shape), np.dtype(code).itemsize * math.prod(shape)


# How ranks find each other: each opens a Unix socket and a TCP port, tells all others by MPI where these are, connects
# to the ranks before it, and lets those behind it connect. Who connects shows a secret of the other side, which it
# knows from MPI alone, and gets its own shown. So no other process is taken for a rank.

_TOKEN_BYTES = 16
# The other side's secret, the own rank, and whether memory of the other side can be mapped.
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}si?")
_CARD_BYTES, _MAX_ADDRESSES = 4096, 50
_CONNECTING_SECONDS, _HELLO_SECONDS = 3.0, 10.0


def connect_ranks(communicator: Any, host: str, interface: str, blocks: SharedBlocks) -> dict[int, Peer]:
    """Connect this rank with all others; raises ExecutionError if one cannot be reached."""
    rank, token = communicator.rank, secrets.token_bytes(_TOKEN_BYTES)
    hosts = [str(item["host"]) for item in _exchange(communicator, {"host": host})]
    near = {other for other, name in enumerate(hosts) if name == host}
    with ExitStack() as stack:
        unix = stack.enter_context(RankSocket())
        networks = [] if len(near) == len(hosts) else list_networks(interface)[:_MAX_ADDRESSES]
        server = stack.enter_context(_listen(networks, interface)) if networks else None
        card = {
            "path": unix.path,
            "addresses": [str(item.ip) for item in networks],
            "port": server.getsockname()[1] if server else 0,
            "token": token.hex(),
            "probe": blocks.make_probe(),
        }
        cards = _exchange(communicator, card)
        peers, tokens = {}, [bytes.fromhex(item["token"]) for item in cards]

        def add(other: int, connection: socket.socket) -> Peer:
            peers[other] = peer = Peer(other, FrameSocket(connection))
            if other in near:
                peer.blocks.try_probe(cards[other]["probe"])
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer

        connections = {}
        for other in range(rank):
            place = cards[other]
            connection = connect_rank(place["path"], rank) if other in near else _connect(place, networks, hosts[other])
            connections[other] = connection
            maps = add(other, connection).blocks.is_mapped
            connection.sendall(_HELLO.pack(tokens[other], rank, maps))
        while len(peers) < len(hosts) - 1:
            waits_near = any(other in near for other in range(rank + 1, len(hosts)) if other not in peers)
            connection = unix.accept(lambda: None)[1] if waits_near or server is None else server.accept()[0]
            if (hello := _read_hello(connection, token)) is None:
                connection.close()
                continue
            other, shares = hello
            peer = add(other, connection)
            peer.shares = shares
            connection.sendall(_HELLO.pack(tokens[other], rank, peer.blocks.is_mapped))
        for other, connection in connections.items():
            if (hello := _read_hello(connection, token)) is None:
                raise _make_unreachable(hosts[other], "another process answered")
            peers[other].shares = hello[1]
        return peers


def _exchange(communicator: Any, card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what all ranks tell."""
    text = json.dumps(card).encode()
    mine, all_cards = np.zeros(_CARD_BYTES, np.uint8), np.zeros((communicator.size, _CARD_BYTES), np.uint8)
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    wait_idly(communicator.Iallgather(mine, all_cards))
    return [json.loads(row.tobytes().rstrip(b"\0")) for row in all_cards]


def list_networks(interface: str) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """Return this host's addresses with their networks, those of loopback devices last."""
    import psutil

    found = []
    for name, items in psutil.net_if_addrs().items():
        if interface and name != interface:
            continue
        for item in items:
            if item.family == socket.AF_INET:
                found.append(ipaddress.ip_interface(f"{item.address}/{item.netmask or 32}"))
            elif item.family == socket.AF_INET6 and "%" not in item.address:
                found.append(ipaddress.ip_interface(f"{item.address}/64"))
    return sorted(found, key=lambda item: (item.is_loopback, item.version))


def _listen(networks: Sequence[Any], interface: str) -> socket.socket:
    """Return a TCP port of this host: of all addresses, or of that of an interface."""
    if interface:
        family = socket.AF_INET if networks[0].version == 4 else socket.AF_INET6
        return socket.create_server((str(networks[0].ip), 0), family=family, backlog=1024)
    if socket.has_dualstack_ipv6() and any(item.version == 6 for item in networks):
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _connect(card: Mapping[str, Any], networks: Sequence[Any], host: str) -> socket.socket:
    """Return a connection with a rank of another host, by an address in a network of this one if there is any."""
    addresses = [ipaddress.ip_address(item) for item in card["addresses"]]
    mine = {item.ip for item in networks}
    # Addresses that this host has as well come last: those of loopback devices, and of bridges of containers.
    order = sorted(addresses, key=lambda item: (item in mine, not any(item in own.network for own in networks)))
    problem: OSError | None = None
    for address in order:
        try:
            connection = socket.create_connection((str(address), card["port"]), _CONNECTING_SECONDS)
        except OSError as failure:
            problem = failure
            continue
        connection.settimeout(None)
        return connection
    raise _make_unreachable(host, str(problem or "it has no network address"))


def _read_hello(connection: socket.socket, token: bytes) -> tuple[int, bool] | None:
    """Return who has connected, and whether it can map memory of this rank; None if it does not know the secret."""
    if (data := read_exactly(connection, _HELLO.size, _HELLO_SECONDS)) is None:
        return None
    shown, rank, maps = _HELLO.unpack(data)
    return (rank, maps) if secrets.compare_digest(shown, token) else None


def _make_unreachable(host: str, problem: str) -> ExecutionError:
    hint = "ranks need free TCP ports in both directions: look for a firewall, or name the network with --interface"
    return ExecutionError("K007", f"no connection: {problem}", where=f"host {host}", hint=hint)
