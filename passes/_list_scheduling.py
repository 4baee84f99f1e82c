"""List scheduling kernels: which ready node goes next, and where."""

from __future__ import annotations

import numpy as np

from onnxplace.kernels import kernel


@kernel
def earliest_task_first(
    topological,
    group,
    pinned,
    seconds,
    limit,
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
    weight_starts,
    weight_items,
    weight_bytes,
    workspace,
    member_starts,
    members,
    latency,
    per_byte,
    link_model,
):
    """Place nodes one by one: of all ready nodes and devices, the pair that can start first (ties by position, device).

    Memory is accounted as the schedule grows: weights once per device, a value on its device and on each that
    received it until all its readers, and those of its views, are placed; an output for good; a view takes none. A
    group goes where its first node goes, if its weights fit there; they are reserved at once. Returns device and
    planned start per node; device -1 where nothing fits any more.
    """
    count = len(topological)
    devices = len(limit)
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
    waiting = np.zeros(count, np.int64)
    ready = [np.int64(0) for _ in range(0)]
    for node in range(count):
        for k in range(in_starts[node], in_starts[node + 1]):
            waiting[node] += producer[ins[k]] >= 0
        if waiting[node] == 0:
            ready.append(np.int64(node))
    for g in range(len(home)):
        if home[g] >= 0:
            for m in range(member_starts[g], member_starts[g + 1]):
                for k in range(weight_starts[members[m]], weight_starts[members[m] + 1]):
                    if not held[home[g], weight_items[k]]:
                        held[home[g], weight_items[k]] = True
                        used[home[g]] += weight_bytes[weight_items[k]]
    while len(ready) > 0:
        best_index = -1
        best_device = -1
        best_start = np.inf
        best_position = count
        for index in range(len(ready)):
            node = ready[index]
            g = group[node]
            for d in range(devices):
                if home[g] >= 0 and home[g] != d:
                    continue
                earliest = free[d]
                channel = receiving[d]
                for k in range(in_starts[node], in_starts[node + 1]):
                    value = ins[k]
                    if producer[value] < 0:
                        continue
                    source = device[producer[value]]
                    if source == d:
                        earliest = max(earliest, finish[producer[value]])
                    elif arrival[value, d] >= 0.0:
                        earliest = max(earliest, arrival[value, d])
                    else:
                        begin = finish[producer[value]]
                        if link_model != 1:
                            begin = max(begin, max(sending[source], channel))
                        channel = begin + latency[source, d] + value_bytes[value] * per_byte[source, d]
                        earliest = max(earliest, channel)
                if earliest > best_start or (earliest == best_start and position[node] >= best_position):
                    continue
                need = workspace[node]
                for k in range(out_starts[node], out_starts[node + 1]):
                    if roots[outs[k]] == outs[k]:
                        need += value_bytes[outs[k]]
                for k in range(in_starts[node], in_starts[node + 1]):
                    if producer[ins[k]] < 0 or (device[producer[ins[k]]] != d and arrival[ins[k], d] < 0.0):
                        need += value_bytes[ins[k]]
                if home[g] < 0:
                    for m in range(member_starts[g], member_starts[g + 1]):
                        for k in range(weight_starts[members[m]], weight_starts[members[m] + 1]):
                            if not held[d, weight_items[k]]:
                                need += weight_bytes[weight_items[k]]
                if used[d] + need > limit[d]:
                    continue
                best_index, best_device, best_start, best_position = index, d, earliest, position[node]
        if best_index < 0:
            return device, start
        node = ready[best_index]
        ready[best_index] = ready[-1]
        ready.pop()
        d = best_device
        g = group[node]
        if home[g] < 0:
            home[g] = d
            for m in range(member_starts[g], member_starts[g + 1]):
                for k in range(weight_starts[members[m]], weight_starts[members[m] + 1]):
                    if not held[d, weight_items[k]]:
                        held[d, weight_items[k]] = True
                        used[d] += weight_bytes[weight_items[k]]
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            if producer[value] < 0:
                if arrival[value, d] < 0.0:
                    arrival[value, d] = 0.0
                    used[d] += value_bytes[value]
                continue
            source = device[producer[value]]
            if source != d and arrival[value, d] < 0.0:
                begin = finish[producer[value]]
                if link_model != 1:
                    begin = max(begin, max(sending[source], receiving[d]))
                end = begin + latency[source, d] + value_bytes[value] * per_byte[source, d]
                sending[source] = max(sending[source], end)
                receiving[d] = max(receiving[d], end)
                if link_model == 2:
                    receiving[source] = max(receiving[source], end)
                    sending[d] = max(sending[d], end)
                arrival[value, d] = end
                used[d] += value_bytes[value]
        device[node] = d
        start[node] = best_start
        finish[node] = best_start + seconds[d, node]
        free[d] = finish[node]
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            if roots[value] == value and unread[value] > 0:
                used[d] += value_bytes[value]
            for j in range(read_starts[value], read_starts[value + 1]):
                waiting[readers[j]] -= 1
                if waiting[readers[j]] == 0:
                    ready.append(np.int64(readers[j]))
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            while value >= 0:
                unread[value] -= 1
                if unread[value] == 0:
                    for e in range(devices):
                        made_here = producer[value] >= 0 and device[producer[value]] == e and roots[value] == value
                        if made_here or arrival[value, e] >= 0.0:
                            used[e] -= value_bytes[value]
                value = roots[value] if roots[value] != value else -1
    return device, start
