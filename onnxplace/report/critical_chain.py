"""The chain of events that determines a step: each begins when the one before it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onnxplace.report.crossings import find_device_predecessors
from onnxplace.report.page_records import Bound, ChainPart
from onnxplace.report.placed_step import PlacedStep
from onnxplace.report.text import format_milliseconds

# Remarks on shares of a step below this are left out.
MIN_REMARKED_SHARE = 0.005


@dataclass(frozen=True)
class _Link:
    """An event of the chain, or a pause between two."""

    kind: str
    where: str
    seconds: float


def explain_step(
    step: PlacedStep,
    step_seconds: float,
    lower_bound_seconds: float,
    single_device_seconds: float,
    request_seconds: float = 0.0,
) -> Bound:
    """Return the parts of a step, and what keeps it above its lower bound.

    Args:
        step: The simulated step.
        step_seconds: The predicted step, from the call to the last output.
        lower_bound_seconds: No placement is faster.
        single_device_seconds: The step on the best single device; 0 if that is unknown.
        request_seconds: The part of a step before its first event and after its last one.
    """
    parts: dict[tuple[str, str], list[float]] = {}
    for link in _walk_back(step):
        parts.setdefault((link.kind, link.where), []).append(link.seconds)
    chain = [ChainPart(kind, where, sum(seconds), len(seconds)) for (kind, where), seconds in parts.items()]
    if request_seconds > 0:
        chain.append(ChainPart("request", "", request_seconds, 1))
    compute = step.simulation.compute_seconds
    busiest = int(compute.argmax()) if len(compute) else 0
    bound = Bound(
        step_seconds=step_seconds,
        lower_bound_seconds=lower_bound_seconds,
        single_device_seconds=single_device_seconds,
        even_seconds=float(compute.sum()) / max(len(compute), 1),
        busiest_device=step.device_names[busiest] if len(compute) else "",
        busiest_seconds=float(compute.max(initial=0.0)),
        chain=tuple(sorted(chain, key=lambda part: (-part.seconds, part.where))),
        remarks=(),
    )
    return replace(bound, remarks=tuple(_list_remarks(bound)))


def _walk_back(step: PlacedStep) -> Iterator[_Link]:
    """Yield the events from the last one of the step to its start."""
    simulation, sent = step.simulation, step.simulation.transfers
    start, finish = simulation.start_seconds.tolist(), simulation.finish_seconds.tolist()
    sent_start, sent_finish = sent.start_seconds.tolist(), sent.finish_seconds.tolist()
    before_node, before_transfer = find_device_predecessors(step), _find_channel_predecessors(step)
    transfer_of = {pair: index for index, pair in enumerate(zip(sent.value.tolist(), sent.destination.tolist()))}
    ends = [(seconds, "node", index) for index, seconds in enumerate(finish)]
    ends += [(seconds, "transfer", index) for index, seconds in enumerate(sent_finish)]
    last = max(ends, default=None)
    while last is not None:
        _, kind, index = last
        if kind == "node":
            device, begin = int(step.device[index]), start[index]
            yield _Link("compute", step.device_names[device], finish[index] - begin)
            candidates = [(finish[node], "node", node) for node in (before_node[index],) if node >= 0]
            for value in step.graph.inputs[index].tolist():
                producer = int(step.graph.producer[value])
                if producer >= 0 and int(step.device[producer]) == device:
                    candidates.append((finish[producer], "node", producer))
                elif producer >= 0:
                    transfer = transfer_of[value, device]
                    candidates.append((sent_finish[transfer], "transfer", transfer))
        else:
            begin = sent_start[index]
            name = step.name_link(int(sent.source[index]), int(sent.destination[index]))
            yield _Link("transfer", name, sent_finish[index] - begin)
            producer = int(step.graph.producer[int(sent.value[index])])
            candidates = [(finish[producer], "node", producer)]
            candidates += [(sent_finish[item], "transfer", item) for item in before_transfer[index]]
        last = max(candidates, default=None)
        pause = begin - (last[0] if last is not None else 0.0)
        if pause > 1e-12:
            yield _Link("wait", "", pause)


def _find_channel_predecessors(step: PlacedStep) -> list[list[int]]:
    """Return, for each transfer, those that held its channels before it."""
    sent, last = step.simulation.transfers, dict[tuple[str, int], int]()
    earlier: list[list[int]] = []
    for index, (source, destination) in enumerate(zip(sent.source.tolist(), sent.destination.tolist())):
        kinds = ("one", "one") if step.target.link_model == "sequential" else ("out", "in")
        channels = list(zip(kinds, (source, destination)))
        if step.target.link_model == "parallel":
            channels = []
        earlier.append([last[channel] for channel in channels if channel in last])
        last.update(dict.fromkeys(channels, index))
    return earlier


def _list_remarks(bound: Bound) -> Iterator[str]:
    """Yield sentences about what keeps the step above its bound, with their times."""
    step = bound.step_seconds
    gap = step - bound.lower_bound_seconds
    if bound.lower_bound_seconds <= 0 or gap <= MIN_REMARKED_SHARE * step:
        yield "The step is as short as its lower bound, or nearly so."
    else:
        share = gap / bound.lower_bound_seconds
        yield f"The step is {format_milliseconds(gap)} ({share:.1%}) longer than its lower bound."
    yield from _remark_on_chain(bound.chain, step)
    spread = bound.busiest_seconds - bound.even_seconds
    if spread > MIN_REMARKED_SHARE * step:
        busiest, even = format_milliseconds(bound.busiest_seconds), format_milliseconds(bound.even_seconds)
        yield f"{bound.busiest_device} computes {busiest}; evenly spread, each device would compute {even}."


def _remark_on_chain(chain: Sequence[ChainPart], step: float) -> Iterator[str]:
    """Yield sentences about the parts of the chain that do not compute."""
    texts = {
        "transfer": "Transfers that nothing hides take {}.",
        "wait": "Nothing happens for {}.",
        "request": "The request itself, before its first and after its last segment, takes {}.",
    }
    for kind, text in texts.items():
        seconds = sum(part.seconds for part in chain if part.kind == kind)
        if seconds > MIN_REMARKED_SHARE * step:
            yield text.format(format_milliseconds(seconds))
    devices = [part.where for part in chain if part.kind == "compute"]
    if len(devices) > 1:
        yield f"The chain that determines the step computes on {', '.join(devices)}, one after the other."
