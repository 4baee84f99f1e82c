"""List scheduling: which ready node goes next, and where. The kernel behind m-ETF and m-SCT.

For each device, ready nodes wait in two heaps: those whose inputs will be there later, by that time, and those whose
inputs can be there when the device is next free, by topological position. A node moves from the first to the second
as the device's clock advances, and is looked at again when it comes up, since channels may have become busier. So a
decision costs O(D log N), however many nodes are ready.
"""

from __future__ import annotations

import heapq

import numpy as np

from onnxplace.kernels import kernel


@kernel
def _input_ready(
    node,
    d,
    device,
    finish,
    arrival,
    sending,
    receiving,
    producer,
    value_bytes,
    in_starts,
    ins,
    latency,
    per_byte,
    link_model,
):
    """When all inputs of `node` can be on device `d`, sending what is not there yet one after the other."""
    earliest = 0.0
    channel = receiving[d]
    for k in range(in_starts[node], in_starts[node + 1]):
        value = ins[k]
        maker = producer[value]
        if maker < 0:
            continue
        source = device[maker]
        if source == d:
            earliest = max(earliest, finish[maker])
        elif arrival[value, d] >= 0.0:
            earliest = max(earliest, arrival[value, d])
        else:
            begin = finish[maker]
            if link_model != 1:
                begin = max(begin, max(sending[source], channel))
            channel = begin + latency[source, d] + value_bytes[value] * per_byte[source, d]
            earliest = max(earliest, channel)
    return earliest


@kernel
def _need(
    node,
    d,
    g,
    home,
    held,
    device,
    arrival,
    producer,
    value_bytes,
    roots,
    out_starts,
    outs,
    in_starts,
    ins,
    workspace,
    group_starts,
    group_weights,
    weight_bytes,
    group_extra,
):
    """Bytes that running `node` on device `d` would add there now; the weights of its whole group if it decides."""
    need = workspace[node]
    for k in range(out_starts[node], out_starts[node + 1]):
        if roots[outs[k]] == outs[k]:
            need += value_bytes[outs[k]]
    for k in range(in_starts[node], in_starts[node + 1]):
        value = ins[k]
        if arrival[value, d] < 0.0 and (producer[value] < 0 or device[producer[value]] != d):
            need += value_bytes[value]
    if home[g] < 0:
        need += group_extra[g]
        for k in range(group_starts[g], group_starts[g + 1]):
            if not held[d, group_weights[k]]:
                need += weight_bytes[group_weights[k]]
    return need


@kernel
def list_schedule(
    topological,
    group,
    pinned,
    seconds,
    limit,
    admit,
    producer,
    value_bytes,
    is_output,
    roots,
    out_starts,
    outs,
    in_starts,
    ins,
    read_starts,
    readers,
    group_starts,
    group_weights,
    weight_bytes,
    workspace,
    group_size,
    group_extra,
    favourite,
    latency,
    per_byte,
    link_model,
):
    """Place nodes one by one: of all ready nodes and devices, the pair that can start first.

    Ties go to the node that is first in topological order, then to the first device. With favourite children (m-SCT;
    all -1 for m-ETF), a device whose last node has a ready favourite keeps itself for it, unless a node is urgent:
    it could have started on any device by then.

    Memory is accounted as the schedule grows: weights once per device, a value where it is made and where it was sent
    until all its readers, and those of its views, are placed; an output for good; a view takes none. The first node
    of a group decides for the group, whose weights, and `group_extra` until its last node is placed, are reserved
    there; a group is only taken on while the device stays within `admit`, so that there is room for its later nodes.
    Returns device and planned start per node; device -1 for those left when nothing fitted any more.
    """
    count, devices = len(topological), len(limit)
    position = np.empty(count, np.int64)
    for k in range(count):
        position[topological[k]] = k
    home = pinned.copy()
    device = np.full(count, -1, np.int32)
    start = np.zeros(count, np.float64)
    finish = np.zeros(count, np.float64)
    free = np.zeros(devices, np.float64)
    sending = np.zeros(devices, np.float64)
    receiving = np.zeros(devices, np.float64)
    last = np.full(devices, -1, np.int64)
    held = np.zeros((devices, len(weight_bytes)), np.bool_)
    used = np.zeros(devices, np.int64)
    arrival = np.full((len(producer), devices), -1.0)
    unread = np.zeros(len(producer), np.int64)
    for value in range(len(producer)):
        reads = read_starts[value + 1] - read_starts[value]
        unread[value] += reads
        if roots[value] != value:
            unread[roots[value]] += reads
        if is_output[value]:
            unread[value] += 1
            unread[roots[value]] += 1
    members_left = group_size.copy()
    for g in range(len(home)):
        if home[g] >= 0:
            used[home[g]] += group_extra[g]
            for k in range(group_starts[g], group_starts[g + 1]):
                if not held[home[g], group_weights[k]]:
                    held[home[g], group_weights[k]] = True
                    used[home[g]] += weight_bytes[group_weights[k]]
    later = [[(0.0, np.int64(0), np.int64(0)) for _ in range(0)] for _ in range(devices)]
    now = [[(np.int64(0), np.int64(0)) for _ in range(0)] for _ in range(devices)]
    blocked = [[(np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)] for _ in range(devices)]
    urgent_later = [(0.0, np.int64(0), np.int64(0)) for _ in range(0)]
    urgent_now = [(np.int64(0), np.int64(0)) for _ in range(0)]
    use_favourites = False
    for node in range(count):
        use_favourites = use_favourites or favourite[node] >= 0
    waiting = np.zeros(count, np.int64)
    fresh = [np.int64(0) for _ in range(0)]
    for node in range(count):
        for k in range(in_starts[node], in_starts[node + 1]):
            if producer[ins[k]] >= 0:
                waiting[node] += 1
        if waiting[node] == 0:
            fresh.append(np.int64(node))
    left = count
    while left > 0:
        for node in fresh:
            worst = 0.0
            for d in range(devices):
                if home[group[node]] < 0 or home[group[node]] == d:
                    ready = _input_ready(
                        node,
                        d,
                        device,
                        finish,
                        arrival,
                        sending,
                        receiving,
                        producer,
                        value_bytes,
                        in_starts,
                        ins,
                        latency,
                        per_byte,
                        link_model,
                    )
                    worst = max(worst, ready)
                    heapq.heappush(later[d], (ready, position[node], np.int64(node)))
            if use_favourites:
                heapq.heappush(urgent_later, (worst, position[node], np.int64(node)))
        fresh.clear()
        most_free = free.max()
        best_node, best_device, best_start, best_position = np.int64(-1), -1, np.inf, np.int64(count)
        for d in range(devices):
            # The node that could start first here: (when, position, node).
            found, when = np.int64(-1), np.inf
            while found < 0 and (len(now[d]) > 0 or len(later[d]) > 0):
                while len(later[d]) > 0 and later[d][0][0] <= free[d]:
                    _, rank, node = heapq.heappop(later[d])
                    heapq.heappush(now[d], (rank, node))
                immediate = len(now[d]) > 0
                if immediate:
                    rank, node = now[d][0]
                    key = free[d]
                else:
                    key, rank, node = later[d][0]
                g = group[node]
                stale = device[node] >= 0 or (home[g] >= 0 and home[g] != d)
                ready, need = 0.0, np.int64(0)
                if not stale:
                    ready = _input_ready(
                        node,
                        d,
                        device,
                        finish,
                        arrival,
                        sending,
                        receiving,
                        producer,
                        value_bytes,
                        in_starts,
                        ins,
                        latency,
                        per_byte,
                        link_model,
                    )
                    need = _need(
                        node,
                        d,
                        g,
                        home,
                        held,
                        device,
                        arrival,
                        producer,
                        value_bytes,
                        roots,
                        out_starts,
                        outs,
                        in_starts,
                        ins,
                        workspace,
                        group_starts,
                        group_weights,
                        weight_bytes,
                        group_extra,
                    )
                fits = used[d] + need <= (admit[d] if home[g] < 0 and group_size[g] > 1 else limit[d])
                if not stale and fits and ready <= key:
                    found, when = node, max(ready, free[d])
                    break
                if immediate:
                    heapq.heappop(now[d])
                else:
                    heapq.heappop(later[d])
                if not stale and not fits:
                    heapq.heappush(blocked[d], (need, rank, node))
                elif not stale:
                    heapq.heappush(later[d], (ready, rank, node))
            # A favourite child that waits for this device, against a node that nobody could start later than now.
            child = np.int64(-1)
            if use_favourites and last[d] >= 0:
                child = np.int64(favourite[last[d]])
            if (
                child >= 0
                and device[child] < 0
                and waiting[child] == 0
                and (home[group[child]] < 0 or home[group[child]] == d)
            ):
                child_start = max(
                    free[d],
                    _input_ready(
                        child,
                        d,
                        device,
                        finish,
                        arrival,
                        sending,
                        receiving,
                        producer,
                        value_bytes,
                        in_starts,
                        ins,
                        latency,
                        per_byte,
                        link_model,
                    ),
                )
                first = True
                for e in range(devices):
                    if e != d and (home[group[child]] < 0 or home[group[child]] == e):
                        ready = max(
                            free[e],
                            _input_ready(
                                child,
                                e,
                                device,
                                finish,
                                arrival,
                                sending,
                                receiving,
                                producer,
                                value_bytes,
                                in_starts,
                                ins,
                                latency,
                                per_byte,
                                link_model,
                            ),
                        )
                        first = first and child_start <= ready
                need = _need(
                    child,
                    d,
                    group[child],
                    home,
                    held,
                    device,
                    arrival,
                    producer,
                    value_bytes,
                    roots,
                    out_starts,
                    outs,
                    in_starts,
                    ins,
                    workspace,
                    group_starts,
                    group_weights,
                    weight_bytes,
                    group_extra,
                )
                if first and used[d] + need <= (
                    admit[d] if home[group[child]] < 0 and group_size[group[child]] > 1 else limit[d]
                ):
                    found, when = child, child_start
                    while len(urgent_later) > 0 and urgent_later[0][0] <= most_free:
                        _, rank, node = heapq.heappop(urgent_later)
                        heapq.heappush(urgent_now, (rank, node))
                    while len(urgent_now) > 0 and device[urgent_now[0][1]] >= 0:
                        heapq.heappop(urgent_now)
                    while len(urgent_now) == 0 and len(urgent_later) > 0 and device[urgent_later[0][2]] >= 0:
                        heapq.heappop(urgent_later)
                    node, deadline = np.int64(-1), np.inf
                    if len(urgent_now) > 0:
                        node, deadline = urgent_now[0][1], most_free
                    elif len(urgent_later) > 0:
                        node, deadline = urgent_later[0][2], urgent_later[0][0]
                    if (
                        node >= 0
                        and node != child
                        and deadline <= child_start
                        and (home[group[node]] < 0 or home[group[node]] == d)
                    ):
                        need = _need(
                            node,
                            d,
                            group[node],
                            home,
                            held,
                            device,
                            arrival,
                            producer,
                            value_bytes,
                            roots,
                            out_starts,
                            outs,
                            in_starts,
                            ins,
                            workspace,
                            group_starts,
                            group_weights,
                            weight_bytes,
                            group_extra,
                        )
                        opens = home[group[node]] < 0 and group_size[group[node]] > 1
                        if used[d] + need <= (admit[d] if opens else limit[d]):
                            found = node
                            when = max(
                                free[d],
                                _input_ready(
                                    node,
                                    d,
                                    device,
                                    finish,
                                    arrival,
                                    sending,
                                    receiving,
                                    producer,
                                    value_bytes,
                                    in_starts,
                                    ins,
                                    latency,
                                    per_byte,
                                    link_model,
                                ),
                            )
            if found >= 0 and (when < best_start or (when == best_start and position[found] < best_position)):
                best_node, best_device, best_start, best_position = found, d, when, position[found]
        if best_node < 0:
            # Nothing fits as it was counted when it came up; weights placed since may have made room for it.
            revived = False
            for d in range(devices):
                again = blocked[d].copy()
                blocked[d].clear()
                for _, rank, node in again:
                    g = group[node]
                    if device[node] < 0 and (home[g] < 0 or home[g] == d):
                        need = _need(
                            node,
                            d,
                            g,
                            home,
                            held,
                            device,
                            arrival,
                            producer,
                            value_bytes,
                            roots,
                            out_starts,
                            outs,
                            in_starts,
                            ins,
                            workspace,
                            group_starts,
                            group_weights,
                            weight_bytes,
                            group_extra,
                        )
                        if used[d] + need <= (admit[d] if home[g] < 0 and group_size[g] > 1 else limit[d]):
                            revived = True
                            heapq.heappush(later[d], (0.0, rank, node))
                        else:
                            heapq.heappush(blocked[d], (need, rank, node))
            if not revived:
                return device, start
            continue
        node, d = best_node, best_device
        g = group[node]
        if home[g] < 0:
            home[g] = d
            used[d] += group_extra[g]
            for k in range(group_starts[g], group_starts[g + 1]):
                if not held[d, group_weights[k]]:
                    held[d, group_weights[k]] = True
                    used[d] += weight_bytes[group_weights[k]]
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            if arrival[value, d] >= 0.0:
                continue
            if producer[value] < 0:
                arrival[value, d] = 0.0
                used[d] += value_bytes[value]
            elif device[producer[value]] != d:
                source = device[producer[value]]
                begin = finish[producer[value]]
                if link_model != 1:
                    begin = max(begin, max(sending[source], receiving[d]))
                end = begin + latency[source, d] + value_bytes[value] * per_byte[source, d]
                sending[source] = end
                receiving[d] = end
                if link_model == 2:
                    receiving[source] = end
                    sending[d] = end
                arrival[value, d] = end
                used[d] += value_bytes[value]
        device[node] = d
        start[node] = best_start
        finish[node] = best_start + seconds[d, node]
        free[d] = finish[node]
        last[d] = node
        left -= 1
        members_left[g] -= 1
        if members_left[g] == 0:
            used[d] -= group_extra[g]
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            if roots[value] == value and unread[value] > 0:
                used[d] += value_bytes[value]
            for j in range(read_starts[value], read_starts[value + 1]):
                waiting[readers[j]] -= 1
                if waiting[readers[j]] == 0:
                    fresh.append(np.int64(readers[j]))
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            while value >= 0:
                unread[value] -= 1
                if unread[value] == 0:
                    for e in range(devices):
                        made_here = producer[value] >= 0 and device[producer[value]] == e and roots[value] == value
                        if made_here or arrival[value, e] >= 0.0:
                            used[e] -= value_bytes[value]
                            while len(blocked[e]) > 0 and used[e] + blocked[e][0][0] <= limit[e]:
                                _, rank, other = heapq.heappop(blocked[e])
                                heapq.heappush(later[e], (0.0, rank, other))
                value = roots[value] if roots[value] != value else -1
    return device, start
