"""Check traces against the trace event format, and against what Perfetto asks for beyond it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.manifest import Manifest

Entry = Mapping[str, Any]
PROCESSES = {1: "measured", 2: "predicted"}
REQUIRED_KEYS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "cname", "ts", "dur", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "t": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}


def check_format(trace: Entry) -> None:
    """Raise AssertionError unless a trace is valid.

    Every row has a name and belongs to one process, and its events do not overlap. Arrows begin and end inside events,
    and go forwards in time.
    """
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    entries: Sequence[Entry] = trace["traceEvents"]
    for entry in entries:
        assert set(entry) == REQUIRED_KEYS[entry["ph"]], entry
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        for key in ("ts", "dur"):
            # Readers multiply by 1000 and cut off: multiples of 1 / 8 stay exact.
            assert entry.get(key, 0) >= 0
            assert entry.get(key, 0) * 8 % 1 == 0
    names = [entry for entry in entries if entry["ph"] == "M" and entry["name"] == "thread_name"]
    threads = [entry["tid"] for entry in names]
    assert len(set(threads)) == len(threads), "Perfetto knows threads by their number alone"
    assert not set(threads) & set(PROCESSES), "a thread with the number of its process is its main thread"
    process_of = {entry["tid"]: entry["pid"] for entry in names}
    events = list(list_events(trace))
    assert {event["tid"] for event in events} == set(threads), "a row without a name, or a name without events"
    rows = defaultdict(list)
    for event in events:
        assert event["pid"] == process_of[event["tid"]]
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for (_, finish), (start, _) in pairwise(sorted(spans)):
            assert finish <= start, "events of a row overlap"
    _check_arrows(entries, rows)


def _check_arrows(entries: Sequence[Entry], rows: Mapping[int, Sequence[tuple[float, float]]]) -> None:
    arrows = defaultdict(list)
    for entry in entries:
        if entry["ph"] in "stf":
            arrows[entry["id"]].append(entry)
    for ends in arrows.values():
        assert "".join(entry["ph"] for entry in ends) in ("stf", "sf")
        assert len({(entry["pid"], entry["cat"], entry["name"]) for entry in ends}) == 1
        times = [entry["ts"] for entry in ends]
        assert times == sorted(times), "an arrow goes backwards"
        for entry in ends:
            assert any(start <= entry["ts"] <= finish for start, finish in rows[entry["tid"]]), "an arrow from nothing"
        assert ends[-1]["bp"] == "e"


def list_events(trace: Entry, process: str = "", category: str = "") -> Iterator[Entry]:
    """Yield the events of a process and category, or of all."""
    for entry in trace["traceEvents"]:
        if entry["ph"] == "X" and process in ("", PROCESSES[entry["pid"]]) and category in ("", entry["cat"]):
            yield entry


def name_rows(trace: Entry, process: str) -> dict[int, str]:
    """Return the names of the rows of a process."""
    return {
        entry["tid"]: entry["args"]["name"]
        for entry in trace["traceEvents"]
        if entry["ph"] == "M" and entry["name"] == "thread_name" and PROCESSES[entry["pid"]] == process
    }


def check_requests(trace: Entry, manifest: Manifest, numbers: Sequence[int]) -> None:
    """Raise AssertionError unless a trace has everything that these requests do, measured and predicted.

    Each runs every segment once, on the device of its route, and receives every value that crosses, with an arrow.
    """
    routes = list_routes(manifest)
    crossing = {
        (step.value, device)
        for device, program in manifest.programs.items()
        for step in program
        if step.op == "receive"
    }
    for process in PROCESSES.values():
        rows = name_rows(trace, process)
        requested = [event["args"]["request"] for event in list_events(trace, process, "request")]
        assert requested == list(numbers)
        for number in numbers:
            own = [event for event in list_events(trace, process) if event["args"]["request"] == number]
            devices = routes[own[0]["args"]["route"]].devices if own else {}
            runs = sorted((event["name"], rows[event["tid"]]) for event in own if event["cat"] == "run")
            expected = [(item.id, f"{devices[item.device]} compute") for item in manifest.segments]
            assert runs == sorted(expected)
            copies = [(event["name"], rows[event["tid"]].split(" ")[0]) for event in own if event["cat"] == "copy"]
            assert sorted(copies) == sorted((value, devices[device]) for value, device in crossing)
    arrows = [entry for entry in trace["traceEvents"] if entry["ph"] == "s"]
    assert len(arrows) == 2 * len(numbers) * len(crossing)
    assert len([entry for entry in trace["traceEvents"] if entry["ph"] == "t"]) == len(arrows), (
        "each is read by a segment"
    )
