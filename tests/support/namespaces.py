"""Two hosts on one machine: network namespaces with a veth pair between them, and a program in place of ssh.

Nothing else connects them, so a message between them crosses the pair, whose counters show it. Root only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The names of both hosts, and their addresses.
NAMES = ("node1", "node2")
ADDRESSES = ("10.213.78.1", "10.213.78.2")
NODES = tuple(f"{name}/cpu:0" for name in NAMES)
CABLE_SECONDS = 30.0
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000
# Skips options and takes the host's name, as ssh does; an unknown host is unreachable.
_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1
shift
[ -e /run/netns/PREFIX-$host ] || { echo "no route to host $host" >&2; exit 255; }
[ $host = node1 ] && cores="FIRST_CORES" || cores="SECOND_CORES"
exec ip netns exec PREFIX-$host $cores unshare --uts sh -c "hostname $host; $*"
"""


@dataclass(frozen=True)
class TwoNodes:
    """The hosts `node1` and `node2`."""

    prefix: str
    """Of the names of the namespaces."""
    interface: str
    """The end of the cable, with the same name on both hosts."""
    remote_shell: str
    """The program that runs a command on a host."""
    cores: tuple[int, ...] = ()
    """A core of each host; empty if both have all."""

    @contextmanager
    def on_first(self) -> Iterator[None]:
        """Let this thread, and processes that it starts, be on node1."""
        library = ctypes.CDLL(None, use_errno=True)
        own = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
        affinity = os.sched_getaffinity(0)
        other = os.open(f"/run/netns/{self.prefix}-{NAMES[0]}", os.O_RDONLY)
        try:
            _require(library.setns(other, _NEW_NET))
            _require(library.unshare(_NEW_UTS))
            socket.sethostname(NAMES[0])
            if self.cores:
                os.sched_setaffinity(0, self.cores[:1])
            yield
        finally:
            os.sched_setaffinity(0, affinity)
            _require(library.setns(own[0], _NEW_NET))
            _require(library.setns(own[1], _NEW_UTS))
            for file in (*own, other):
                os.close(file)

    def count_crossed_bytes(self) -> int:
        """Return the bytes that crossed the cable, in both directions together."""
        shown = run_ip("-n", f"{self.prefix}-{NAMES[0]}", "-json", "-statistics", "link", "show", self.interface)
        counters = json.loads(shown)[0]["stats64"]
        return int(counters["rx"]["bytes"] + counters["tx"]["bytes"])

    def set_cable(self, state: str) -> None:
        """Pull the cable ("down"), or put it in again ("up")."""
        run_ip("-n", f"{self.prefix}-{NAMES[1]}", "link", "set", self.interface, state)

    def await_cable(self) -> None:
        """Wait until both hosts know that the cable is in, which Linux tells them once a second."""
        end = time.monotonic() + CABLE_SECONDS
        shown = ("-brief", "link", "show", self.interface, "up")
        while not all(" UP " in run_ip("-n", f"{self.prefix}-{name}", *shown) for name in NAMES):
            assert time.monotonic() < end, "the interfaces do not come up"
            time.sleep(0.05)

    def list_processes(self) -> list[int]:
        """Return the processes that run on the hosts."""
        return [
            int(item)
            for name in NAMES
            for item in run_ip("netns", "pids", f"{self.prefix}-{name}").split()
            if int(item) != os.getpid()
        ]


def find_obstacle() -> str:
    """Return why this machine cannot have namespaces; empty if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]:
        return f"network namespaces need iproute2 and util-linux: there is no {', '.join(missing)}"
    name = f"op{os.getpid()}-try"
    try:
        run_ip("netns", "add", name)
        run_ip("-n", name, "link", "add", "op0", "type", "veth", "peer", "name", "op1")
    except subprocess.CalledProcessError as problem:
        return f"this system refuses network namespaces: {problem.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)
    return ""


@contextmanager
def connect_two_nodes(folder: Path, cores: tuple[int, ...] = ()) -> Iterator[TwoNodes]:
    """Make the hosts and the cable, and remove them at the end.

    Args:
        folder: Gets the program in place of ssh.
        cores: A core for each host; empty to let both have all.
    """
    nodes = TwoNodes(f"op{os.getpid()}", "op0", str(folder / "ssh"), cores)
    spaces = [f"{nodes.prefix}-{name}" for name in NAMES]
    text = _SHELL.replace("PREFIX", nodes.prefix)
    for name, pin in zip(("FIRST_CORES", "SECOND_CORES"), [f"taskset -c {core}" for core in cores] or ["", ""]):
        text = text.replace(name, pin)
    Path(nodes.remote_shell).write_text(text)
    Path(nodes.remote_shell).chmod(0o755)
    try:
        for space in spaces:
            run_ip("netns", "add", space)
            run_ip("-n", space, "link", "set", "lo", "up")
        ends = ["name", nodes.interface, "netns"]
        run_ip("link", "add", *ends, spaces[0], "type", "veth", "peer", *ends, spaces[1])
        for space, address in zip(spaces, ADDRESSES):
            run_ip("-n", space, "address", "add", f"{address}/24", "dev", nodes.interface)
            # Without an IPv6 address, which could not be used for its first seconds.
            run_ip("-n", space, "link", "set", nodes.interface, "addrgenmode", "none", "up")
        nodes.await_cable()
        yield nodes
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=30)


def run_ip(*arguments: str) -> str:
    """Return what `ip` prints; raises CalledProcessError if it fails."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


def _require(result: int) -> None:
    """Raise OSError if a function of the C library has failed."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
