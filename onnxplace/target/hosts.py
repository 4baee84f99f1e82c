"""Hosts in device ids, as in `node1/cpu:0`, and the checks of targets that span several hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import permutations

from onnxplace.errors import TargetError, format_names, format_value, suggest_nearest
from onnxplace.target.kind_table import is_known_kind

# Labels of letters, digits and inner hyphens, joined by dots: names of DNS and IPv4 addresses.
_LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# Host names are part of file names.
MAX_HOST_NAME = 63
# Both ends of a link that stands for every two devices, or for every two of one host.
ALL_TO_ALL, PER_HOST = "all-to-all", "per-host"


def split_host(device_id: str) -> tuple[str, str]:
    """Return the host of a device id, empty if it names none, and the id of the device on that host.

    >>> split_host("node1/cuda:0/1"), split_host("cuda:0/1")
    (('node1', 'cuda:0/1'), ('', 'cuda:0/1'))
    >>> split_host("node1/qnn/npu:0"), split_host("qnn/npu:0")
    (('node1', 'qnn/npu:0'), ('', 'qnn/npu:0'))
    """
    before, colon, _ = device_id.partition(":")
    host, slash, _ = before.partition("/")
    if not slash or not colon or is_known_kind(before):
        return "", device_id
    return host, device_id[len(host) + 1 :]


def require_host_name(name: str, where: str) -> None:
    """Raise TargetError unless a text can name a host.

    >>> require_host_name("gpu-node.example.org", "--hosts")
    """
    if len(name) > MAX_HOST_NAME or not _HOST_NAME.fullmatch(name):
        message = f"expected a host name of at most {MAX_HOST_NAME} characters, got {format_value(name)}"
        hint = "write it in lower-case letters, digits, hyphens and dots, as in node1 or 10.0.0.1"
        raise TargetError("T005", message, where=where, hint=hint)
    if is_known_kind(f"{name}/npu"):
        message = f"{name}/npu:0 is a device of the execution provider {name}, so that no host can have this name"
        raise TargetError("T005", message, where=where, hint="name the host by its address, or with its domain")


def list_hosts(device_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts that device ids name, in their order, each once.

    >>> list_hosts(["b/cpu:0", "a/cpu:0", "b/cpu:1"])
    ('b', 'a')
    """
    return tuple(dict.fromkeys(host for host in (split_host(item)[0] for item in device_ids) if host))


def require_hosts_on_all(device_ids: Sequence[str], where: str) -> None:
    """Raise TargetError if only some devices name their host."""
    local = next((item for item in device_ids if not split_host(item)[0]), None)
    remote = next((item for item in device_ids if split_host(item)[0]), None)
    if local is not None and remote is not None:
        message = f"{local} names no host, {remote} does"
        hint = f"name the host of every device, as in {split_host(remote)[0]}/{local}, or of none"
        raise TargetError("T005", message, where=where, hint=hint)


def require_hosts_together(device_ids: Sequence[str], where: str) -> None:
    """Raise TargetError unless the devices of each host follow one another.

    Stages and groups of devices that share operators are consecutive devices.
    """
    left, previous = set[str](), ""
    for device_id in device_ids:
        host = split_host(device_id)[0]
        if host in left:
            message = f"expected the devices of host {host} one after another, got {device_id} after one of {previous}"
            hint = "list the devices of each host together: groups of devices that work closely are consecutive"
            raise TargetError("T005", message, where=where, hint=hint)
        if host != previous:
            left.add(previous)
        previous = host


def require_links(device_ids: Sequence[str], links: Collection[tuple[str, str]], where: str = "target") -> None:
    """Raise TargetError unless the ends of links are right, and no link between hosts is missing.

    Args:
        device_ids: All devices of a target.
        links: Sources and destinations: two devices, or two hosts.
        where: For the error.
    """
    devices, hosts = set(device_ids), list_hosts(device_ids)
    groups = {(ALL_TO_ALL, ALL_TO_ALL), (PER_HOST, PER_HOST)}
    for source, destination in links:
        if (source, destination) in groups:
            continue
        link = f"link {source} -> {destination}"
        if source == destination:
            hint = "remove it: data that stays on a device crosses no link"
            if source in hosts:
                hint = f'name two devices of the host, as in source = "{source}/cpu:0"'
            what = "host" if source in hosts else "device"
            raise TargetError("T007", f"a link cannot lead from a {what} to itself", where=link, hint=hint)
        for name in (source, destination):
            if name not in devices and name not in hosts:
                hint = suggest_nearest(name, [*device_ids, *hosts])
                raise TargetError("T007", f"the link names an unknown device: {name!r}", where=where, hint=hint)
        if (source in hosts) != (destination in hosts):
            message = "expected two devices or two hosts as the ends of a link, got one of each"
            raise TargetError("T007", message, where=link, hint=f"hosts: {format_names(hosts, quoted=False)}")
    if hosts and (ALL_TO_ALL, ALL_TO_ALL) not in links:
        _require_links_between(device_ids, set(links), where)


def _require_links_between(device_ids: Sequence[str], links: Set[tuple[str, str]], where: str) -> None:
    """Raise TargetError unless there are links from every device to every device of another host."""
    ends = [(split_host(item)[0], item) for item in device_ids]
    for (source_host, source), (destination_host, destination) in permutations(ends, 2):
        is_given = (source_host, destination_host) in links or (source, destination) in links
        if source_host != destination_host and not is_given:
            message = f"there is no link from host {source_host} to host {destination_host}"
            hint = (
                f'add [[links]] with source = "{source_host}", destination = "{destination_host}", '
                "latency_seconds and bytes_per_second: networks differ too much for a default"
            )
            raise TargetError("T007", message, where=where, hint=hint)
