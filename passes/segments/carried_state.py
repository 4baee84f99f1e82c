"""Carried states: values that stay on one device between calls."""

from __future__ import annotations

from onnxplace.errors import Diagnostic, UsageError
from onnxplace.facts import Placement, Profile, Segments
from onnxplace.model import Model
from onnxplace.state import State


def require_states_together(state: State) -> None:
    """Raise UsageError if a state would move between calls."""
    if Model not in state:
        return
    graph, device, model = state[Profile].graph, state[Placement].device, state[Model]
    value_index = {name: value for value, name in enumerate(graph.value_names)}
    for name, output in model.states.items():
        producer = int(graph.producer[value_index[model.sources.get(output, output)]])
        remote = [node for node in graph.readers[value_index[name]].tolist() if device[node] != device[producer]]
        if remote:
            ids = [state.target.devices[int(device[node])].id for node in (producer, remote[0])]
            raise UsageError(
                "S006",
                f"state {output!r} = {name!r} is made on {ids[0]} and read on {ids[1]} by {graph.names[remote[0]]!r}",
                where="split",
                hint="put coplace before the placer: it keeps both ends of a state together",
            )


def report_crossing_states(state: State) -> tuple[Diagnostic, ...]:
    """Return a note for each state with readers on other devices."""
    if Model not in state:
        return ()
    model, target = state[Model], state.target
    receivers: dict[str, list[str]] = {}
    for program in state[Segments].programs:
        for instruction in program:
            if instruction.op == "send":
                receivers.setdefault(instruction.value, []).append(target.devices[instruction.peer].id)
    return tuple(
        Diagnostic(
            "S010",
            f"state {output!r} stays on its device, but is read on {', '.join(receivers[value])} too: a copy crosses",
            where="split",
            hint="--colocate its readers, or leave it",
        )
        for output in dict.fromkeys(model.states.values())
        if (value := model.sources.get(output, output)) in receivers
    )
