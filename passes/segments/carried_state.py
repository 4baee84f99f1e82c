"""A value that a model hands to its next call stays on one device: hold a placement to that."""

from __future__ import annotations

from onnxplace.errors import Diagnostic, UsageError
from onnxplace.facts import Placement, Profile, Segments
from onnxplace.model import Model
from onnxplace.state import State


def require_states_together(state: State) -> None:
    """Raise UsageError if a state would have to move between devices from one call to the next."""
    if Model not in state:
        return
    graph, device, model = state[Profile].graph, state[Placement].device, state[Model]
    index = {name: value for value, name in enumerate(graph.value_names)}
    for name, output in model.states.items():
        maker = int(graph.producer[index[model.sources.get(output, output)]])
        away = [node for node in graph.readers[index[name]].tolist() if device[node] != device[maker]]
        if away:
            ids = [state.target.devices[int(device[node])].id for node in (maker, away[0])]
            raise UsageError(
                "S006",
                f"state {output!r} = {name!r} is made on {ids[0]} and read on {ids[1]} by {graph.names[away[0]]!r}",
                where="split",
                hint="put coplace before the placer: it keeps both ends of a state together",
            )


def report_crossing_states(state: State) -> tuple[Diagnostic, ...]:
    """Return a note for each state that another device reads while it is made: it stays, and a copy crosses."""
    if Model not in state:
        return ()
    model, target = state[Model], state.target
    sent: dict[str, list[str]] = {}
    for program in state[Segments].programs:
        for item in program:
            if item.op == "send":
                sent.setdefault(item.value, []).append(target.devices[item.peer].id)
    return tuple(
        Diagnostic(
            "S010",
            f"state {output!r} stays on its device, but is read on {', '.join(sent[value])} too: a copy crosses",
            where="split",
            hint="--colocate its readers, or leave it",
        )
        for output in dict.fromkeys(model.states.values())
        if (value := model.sources.get(output, output)) in sent
    )
