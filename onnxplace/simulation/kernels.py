"""Compiled loops that execute a placed graph on paper: times, spans, memory peaks."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_loop


@compiled_loop
def execute(
    order,
    device,
    seconds,
    device_count,
    producer,
    value_bytes,
    out_starts,
    outs,
    in_starts,
    ins,
    read_starts,
    readers,
    latency,
    per_byte,
    link_model,
):
    """Run a placement in simulated time, event by event (DESIGN section 4).

    Each device computes its nodes in the sequence of `order`, one at a time. When a node finishes, its values are
    sent to every other device that reads them, once each. `link_model` 0: each device has one outgoing and one
    incoming channel; 1: no contention; 2: one channel per device for both directions. Transfers are booked when
    they become ready, in that order, so none delays one that was ready before it.

    Returns start, finish (seconds per node; -1 where the order deadlocks) and the transfers as parallel arrays:
    value, source, destination, ready, start, finish.
    """
    count = len(order)
    queue_starts = np.zeros(device_count + 1, np.int64)
    for node in range(count):
        queue_starts[device[node] + 1] += 1
    for d in range(device_count):
        queue_starts[d + 1] += queue_starts[d]
    head = queue_starts[:-1].copy()
    queue = np.empty(count, np.int64)
    for position in range(count):
        d = device[order[position]]
        queue[head[d]] = order[position]
        head[d] += 1
    head = queue_starts[:-1].copy()

    waiting = np.zeros(count, np.int64)
    for node in range(count):
        for k in range(in_starts[node], in_starts[node + 1]):
            waiting[node] += producer[ins[k]] >= 0
    available = np.zeros(count, np.float64)
    start = np.full(count, -1.0)
    finish = np.full(count, -1.0)
    free = np.zeros(device_count, np.float64)
    sending = np.zeros(device_count, np.float64)
    receiving = np.zeros(device_count, np.float64)
    arrival = np.zeros(device_count, np.float64)
    stamp = np.full(device_count, -1, np.int64)
    sent = 0
    for value in range(len(producer)):
        for j in range(read_starts[value], read_starts[value + 1]):
            there = device[readers[j]]
            if producer[value] >= 0 and there != device[producer[value]] and stamp[there] != value:
                stamp[there] = value
                sent += 1
    sent_value, sent_source, sent_destination = np.empty((3, sent), np.int32)
    sent_ready, sent_start, sent_finish = np.empty((3, sent), np.float64)
    stamp[:] = -1
    sent = 0
    running = np.full(device_count, -1, np.int64)
    touched = np.ones(device_count, np.bool_)
    while True:
        for d in range(device_count):
            if touched[d] and running[d] < 0 and head[d] < queue_starts[d + 1]:
                first = queue[head[d]]
                if waiting[first] == 0:
                    head[d] += 1
                    running[d] = first
                    start[first] = max(free[d], available[first])
                    finish[first] = start[first] + seconds[first]
            touched[d] = False
        node = -1  # which is done next; of several, the one of least index
        for d in range(device_count):
            other = running[d]
            if other >= 0 and (
                node < 0 or finish[other] < finish[node] or (finish[other] == finish[node] and other < node)
            ):
                node = other
        if node < 0:
            break
        now, home = finish[node], device[node]
        running[home] = -1
        free[home] = now
        touched[home] = True
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            for j in range(read_starts[value], read_starts[value + 1]):
                reader = readers[j]
                there = device[reader]
                when = now
                if there != home:
                    if stamp[there] != value:
                        stamp[there] = value
                        begin = now
                        if link_model == 0:
                            begin = max(now, max(sending[home], receiving[there]))
                        elif link_model == 2:
                            begin = max(
                                now, max(max(sending[home], receiving[home]), max(sending[there], receiving[there]))
                            )
                        end = begin + latency[home, there] + value_bytes[value] * per_byte[home, there]
                        sending[home] = end
                        receiving[there] = end
                        arrival[there] = end
                        sent_value[sent], sent_source[sent], sent_destination[sent] = value, home, there
                        sent_ready[sent], sent_start[sent], sent_finish[sent] = now, begin, end
                        sent += 1
                    when = arrival[there]
                available[reader] = max(available[reader], when)
                waiting[reader] -= 1
                touched[there] = True
    kept = slice(0, sent)  # all, unless the order deadlocks
    return (
        start,
        finish,
        sent_value[kept],
        sent_source[kept],
        sent_destination[kept],
        sent_ready[kept],
        sent_start[kept],
        sent_finish[kept],
    )


@compiled_loop
def live_spans(
    device,
    start,
    finish,
    rank,
    producer,
    alias,
    is_output,
    read_starts,
    readers,
    copy_starts,
    copy_device,
    copy_begin,
    copy_end,
    end_of_step,
):
    """When each buffer is born and dies. Buffer `v` is value `v` where it is made; buffer `V + c` is copy `c`.

    A view shares the buffer of the value it looks at, where both are on one device. Returns birth, death (seconds)
    and, to order events at one instant, a position in the schedule for each.
    """
    values = len(producer)
    total = values + len(copy_device)
    birth = np.full(total, np.inf)
    death = np.full(total, -1.0)
    birth_rank = np.zeros(total, np.int64)
    death_rank = np.full(total, -1, np.int64)
    root = np.arange(total)
    for value in range(values):
        made = producer[value]
        home = device[made] if made >= 0 else -1
        if made >= 0:
            birth[value] = start[made]
            birth_rank[value] = 2 * rank[made]
            death[value] = finish[made]
            death_rank[value] = 2 * rank[made] + 1
            if is_output[value]:
                death[value] = end_of_step
                death_rank[value] = 2 * len(rank) + 1  # after whatever else happens at the end
        for c in range(copy_starts[value], copy_starts[value + 1]):
            birth[values + c] = copy_begin[c]
            # An input of the model is there before anything happens; a copy counts once it starts to arrive.
            birth_rank[values + c] = -2 if made < 0 else 2 * len(rank)
            death[values + c] = copy_end[c]
            if made >= 0 and copy_end[c] > death[value]:
                death[value] = copy_end[c]
                death_rank[value] = -1
        for j in range(read_starts[value], read_starts[value + 1]):
            reader = readers[j]
            buffer = value
            if device[reader] != home:
                for c in range(copy_starts[value], copy_starts[value + 1]):
                    if copy_device[c] == device[reader]:
                        buffer = values + c
            if finish[reader] > death[buffer] or (
                finish[reader] == death[buffer] and 2 * rank[reader] + 1 > death_rank[buffer]
            ):
                death[buffer] = finish[reader]
                death_rank[buffer] = 2 * rank[reader] + 1
    for value in range(values - 1, -1, -1):
        if alias[value] >= 0 and producer[value] >= 0:
            home = device[producer[value]]
            source = alias[value]
            buffer = source
            if producer[source] < 0 or device[producer[source]] != home:
                for c in range(copy_starts[source], copy_starts[source + 1]):
                    if copy_device[c] == home:
                        buffer = values + c
            root[value] = buffer
            if death[value] > death[buffer] or (
                death[value] == death[buffer] and death_rank[value] > death_rank[buffer]
            ):
                death[buffer] = death[value]
                death_rank[buffer] = death_rank[value]
    return birth, death, birth_rank, death_rank, root


@compiled_loop
def device_peaks(events, where, change, device_count):
    """Most bytes alive at one time on each device, taking the changes in the order of `events`."""
    live = np.zeros(device_count, np.int64)
    peak = np.zeros(device_count, np.int64)
    for k in range(len(events)):
        d = where[events[k]]
        live[d] += change[events[k]]
        peak[d] = max(peak[d], live[d])
    return peak
