"""Which copy of a bundle runs on which hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from onnxplace.bundle import Manifest
from onnxplace.errors import TargetError, UsageError, format_count
from onnxplace.hosts import HostSlots, parse_slots
from onnxplace.runtimes.ranks.plan import RankPlan, list_devices, order_ranks
from onnxplace.target import split_host

MAX_COPIES = 64
_WHERE = "--hosts"


def require_copy_count(count: int) -> None:
    """Raise UsageError unless a bundle can have so many copies."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_COPIES:
        message = f"expected 1 to {MAX_COPIES} copies of the bundle, got {count!r}"
        raise UsageError("K001", message, where="replicas", hint="as in replicas=2, or --replicas 2")


def plan_copies(manifest: Manifest, hosts: str, count: int) -> tuple[RankPlan, ...]:
    """Assign the devices of several copies of a bundle to ranks on hosts.

    A host of the bundle stands for one host of each copy. The first copy takes hosts of its own names, as far as they
    are given. Each copy takes those with the fewest copies, in the order given. A host without a number of slots has
    room for a part of one copy.

    Raises:
        UsageError: the list of hosts is impossible.
        TargetError: there are too few hosts or slots.
    """
    devices = list_devices(manifest)
    named = [split_host(device)[0] for device in devices]
    sizes = Counter(named)
    given = parse_slots(hosts) if hosts else ()
    room: dict[str, int | None] = {item.name: item.slots for item in given}
    used: Counter[str] = Counter()
    plans: list[RankPlan] = []
    for _ in range(count):
        chosen = _choose_hosts(sizes, given, room, used, is_first=not plans)
        if len(chosen) < len(sizes):
            raise _make_shortage(count, len(plans), sizes, hosts)
        for name, host in chosen.items():
            slots = room[host]
            room[host] = 0 if slots is None else slots - sizes[name]
            used[host] += 1
        plans.append(order_ranks(devices, [chosen[name] for name in named]))
    return tuple(plans)


def _choose_hosts(
    sizes: Mapping[str, int],
    given: Sequence[HostSlots],
    room: Mapping[str, int | None],
    used: Mapping[str, int],
    is_first: bool,
) -> dict[str, str]:
    """Return the host of each host of the bundle for one copy; some are missing if there is no room."""

    def has_room(host: str, size: int) -> bool:
        slots = room.get(host, 0)
        return slots is None or slots >= size

    chosen = {name: name for name, size in sizes.items() if is_first and has_room(name, size)}
    order = [item.name for item in given]
    # The largest parts first: a host with room for one of them has room for all smaller ones.
    for name in sorted(sizes, key=lambda item: -sizes[item]):
        hosts = [host for host in order if host not in chosen.values() and has_room(host, sizes[name])]
        if name not in chosen and hosts:
            chosen[name] = min(hosts, key=lambda host: (used[host], order.index(host)))
    return chosen


def _make_shortage(count: int, fitting: int, sizes: Mapping[str, int], hosts: str) -> TargetError:
    """Return the error for hosts that are too few."""
    needs = " and ".join(f"a host with {format_count(size, 'slot')}" for size in sizes.values())
    offer = f"{hosts}, where {fitting} of them fit" if hosts else "no list of hosts"
    message = f"{count} copies of the bundle need {needs} each, got {offer}"
    names = [f"node{number}:{size}" for number, size in enumerate(list(sizes.values()) * count, 1)]
    return TargetError("K009", message, where=_WHERE, hint=f"as in --hosts {','.join(names)}")
