"""Compiled loops that book transfers on the channels of devices (docs/architecture.md, "Model of time").

A device sends one value after the other. Where it has its own channel to receive, a transfer takes the first time
that is free there for its whole length. It may fill a gap between transfers that were booked before, and so delays none
of them. The free times of each channel are a chain of gaps, the last of which has no end.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part

# A time in which a channel is free. Entry `d` begins the chain of device `d`; the last one counts the entries in use.
GAP = np.dtype([("begin", np.float64), ("end", np.float64), ("next", np.int64)], align=True)

# Part of the length of a transfer by which a gap may be too short: equal times differ by rounding.
ROUNDING = 1e-9


@compiled_part
def open_channels(gaps, devices):
    """Make the incoming channels of all devices free."""
    for d in range(devices):
        gaps[d].begin, gaps[d].end, gaps[d].next = 0.0, np.inf, -1
    gaps[len(gaps) - 1].next = devices


@compiled_part
def book_transfer(devices, gaps, link_model, home, destination, now, seconds):
    """Return when a transfer begins that is ready now, and take the channels that it needs for that time.

    `link_model` 0: each device has one outgoing and one incoming channel; 1: no contention; 2: one channel for both
    directions. `devices` are records with the times `sending` and `receiving` up to which channels are taken, `gaps`
    those of `GAP`: one per device and per transfer, and one more. No call may be earlier than the one before it.
    """
    begin = now
    if link_model == 0:
        begin = _book_arrival(gaps, destination, now, max(now, devices[home].sending), seconds)
    elif link_model == 2:
        begin = max(begin, max(devices[home].sending, devices[home].receiving))
        begin = max(begin, max(devices[destination].sending, devices[destination].receiving))
    devices[home].sending = begin + seconds
    devices[destination].receiving = begin + seconds
    return begin


@compiled_part
def _book_arrival(gaps, destination, now, earliest, seconds):
    """Return the first time from `earliest` on at which a channel is free for so long, and take it.

    Gaps that end before `now` are forgotten.
    """
    while gaps[destination].end <= now:
        _remove(gaps, destination)
    tolerance = ROUNDING * seconds
    gap = np.int64(destination)
    begin = max(earliest, gaps[gap].begin)
    while begin + seconds > gaps[gap].end + tolerance:
        gap = gaps[gap].next
        begin = max(earliest, gaps[gap].begin)
    end = begin + seconds
    is_at_end = end >= gaps[gap].end - tolerance
    if begin > gaps[gap].begin + tolerance:
        if not is_at_end:
            # What is left behind the transfer is its own gap.
            rest = gaps[len(gaps) - 1].next
            gaps[len(gaps) - 1].next = rest + 1
            gaps[rest].begin, gaps[rest].end, gaps[rest].next = end, gaps[gap].end, gaps[gap].next
            gaps[gap].next = rest
        gaps[gap].end = begin
    elif is_at_end:
        _remove(gaps, gap)
    else:
        gaps[gap].begin = end
    return begin


@compiled_part
def _remove(gaps, gap):
    """Remove a gap that has an end: the one behind it moves to its entry."""
    following = gaps[gap].next
    gaps[gap].begin, gaps[gap].end, gaps[gap].next = gaps[following].begin, gaps[following].end, gaps[following].next
