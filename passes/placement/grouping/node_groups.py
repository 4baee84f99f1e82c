"""Group nodes that must or should share a device, for `coplace` before a placer and `adjust` after it.

Each source of groups (carried states, patterns, host values, colours, kernels, parameters, forward nodes, only readers)
is a list of pairs to join. Sets of nodes are a union-find structure; two sets that are pinned to different devices are
never joined, and the first reason of a set stays. What only should share a device does so only where the same devices
take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import Diagnostic, UsageError
from onnxplace.facts import Groups, Profile, Shards, is_refused
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph
from onnxplace.model.cut_constraints import HostValue, find_host_values
from onnxplace.model.model import Model
from onnxplace.model.node_metadata import match_nodes, suggest_nodes
from onnxplace.model_metadata import TrainingRoles
from onnxplace.passes.placement.grouping.device_maps import (
    format_list,
    match_removed,
    note_removed,
    read_pins,
)
from onnxplace.passes.placement.grouping.group_kernels import (
    assign_owners,
    fill_owners,
    find_root,
    first_readers,
    join_sets,
    label_derived,
    number_sets,
)
from onnxplace.plugins import ask_plugins
from onnxplace.problem import device_seconds
from onnxplace.state import State
from onnxplace.target.target import Target

Join = Literal["worth", "always", "never"]
Backward = Literal["free", "follow"]
Parameters = Literal["together", "free"]
# The reason of groups around a tensor that is kept between calls.
CARRIED_STATE = "state"
# The largest floating-point type of ONNX: larger values are more than one number.
MAX_NUMBER_BYTES = 8


def group_nodes(
    state: State,
    *,
    join: Join,
    given: bool,
    backward: Backward,
    parameters: Parameters,
    colocate: tuple[str, ...],
    device_map: str,
    keep: bool = False,
) -> tuple[Groups, tuple[Diagnostic, ...]]:
    """Group nodes by the options of `coplace`; return the groups, and notes for the user.

    Parts of sharded operators are pinned to their devices. With `keep`, groups of `state` stay together with their
    pins, unless the device map says otherwise.
    """
    # The order of joins decides: a set keeps its first reason, and a pair that is pinned apart by then is refused. So
    # what must share a device, such as carried states, comes before what should, such as parameters and readers.
    profile, target = state[Profile], state.target
    graph = profile.graph
    removed = state[Model].removed if Model in state else ()
    read_by_plugin = ask_plugins("device_maps", device_map, state) if device_map else None
    pinned, notes = read_by_plugin or read_pins(device_map, graph, target, removed)
    if Shards in state:
        shard_device = state[Shards].device
        pinned = np.where(shard_device >= 0, shard_device, pinned)
    keep = keep and Groups in state
    if keep:
        pinned = np.where(pinned >= 0, pinned, state[Groups].pinned[state[Groups].group])
    union = Union(pinned, _refusing_classes(profile))
    if keep:
        union.join(first_equal(state[Groups].group), np.arange(len(graph)), "grouped before", is_required=True)
    if Model in state:
        _join_carried_states(union, graph, state[Model], target)
    notes += _join_patterns(union, graph, colocate, removed)
    if Model in state:
        notes += _pin_to_host(union, graph, state[Model], target)
    if given and profile.user_groups is not None:
        colored = np.flatnonzero(profile.user_groups >= 0)
        leaders = colored[first_equal(profile.user_groups[colored])]
        union.join(leaders, colored, "the graph's own group", is_required=True)
    split_kernels = union.join(first_equal(profile.unit), np.arange(len(graph)), "one kernel")
    if split_kernels.any():
        first_split = graph.names[int(split_kernels.argmax())]
        notes.append(Diagnostic("G010", "the device map splits what ONNX Runtime would run as one kernel", first_split))
    if parameters == "together" and profile.training is not None:
        members, first = list_parameter_members(graph, profile.training)
        union.join(first, members, "its parameter")
    owner = np.full(len(graph), -1, dtype=np.int32)
    if backward == "follow":
        owner = find_forward_owners(profile)
        if not (owner >= 0).any():
            notes.append(Diagnostic("G011", "no backward node follows a forward node: the graph marks none that can"))
    follows = owner >= 0
    union.join(owner[follows], np.flatnonzero(follows), "its forward node")
    if join != "never" and len(target.devices) > 1:
        seconds = device_seconds(profile, target)
        union.join(*only_readers(graph, seconds, target, ~follows, join == "always"), "its only reader")
    return union.groups(), tuple(notes)


def find_forward_owners(profile: Profile) -> Ints:
    """Return the forward node of each backward node, -1 for none and for forward nodes.

    `Coplace` states the rule. Near-linear.
    """
    graph = profile.graph
    if profile.training is not None:
        return profile.training.owner
    if profile.backward is None or not profile.backward.any():
        return np.full(len(graph), -1, dtype=np.int32)
    color = np.full(len(graph), -1, dtype=np.int32)
    if profile.user_groups is not None:
        colored = np.flatnonzero(profile.user_groups >= 0)
        color[colored] = first_equal(profile.user_groups[colored])
    owner = assign_owners(graph.order, profile.backward, color, graph.producer, graph.inputs.starts, graph.inputs.items)
    return spread_owners(graph, profile.backward, owner)


def spread_owners(graph: OpGraph, is_backward: Bools, owner: Ints) -> Ints:
    """Return the forward node of each backward node, where some have one: others have that of the nearest.

    Distance is the number of values between backward nodes, in either direction. Of those at one distance, found
    breadth first from the first in topological order, the first one counts. Linear in the edges.

    Args:
        graph: The graph.
        is_backward: Per node.
        owner: The forward node per node, -1 for none.
    """
    result: Ints = fill_owners(
        graph.order, is_backward, owner.copy(), graph.producer, *graph.outputs.arrays, *graph.inputs.arrays,
        *graph.readers.arrays,
    )  # fmt: skip
    return result


def list_parameter_members(graph: OpGraph, roles: TrainingRoles) -> tuple[Ints, Ints]:
    """Return nodes, and for each of them the first node of the same parameter.

    Nodes of a parameter read it, or what follows from it alone, such as its transpose; or they read no parameter, and
    compute its gradient, its moments or its new values. What several parameters share belongs to none.
    """
    index = {name: value for value, name in enumerate(graph.value_names)}
    values = np.array([index.get(item.input, -1) for item in roles.step.parameters], dtype=np.int64)
    label = np.full(len(graph.value_names), -1, dtype=np.int32)
    known = np.flatnonzero(values >= 0)
    label[values[known]] = known
    # One number, such as the norm of a parameter, costs nothing to send: its readers need not be with the parameter.
    is_carried = graph.value_bytes > MAX_NUMBER_BYTES
    derived = label_derived(graph.order, graph.producer, *graph.inputs.arrays, label, is_carried)
    produced = np.flatnonzero((graph.producer >= 0) & is_carried)
    label[produced] = derived[graph.producer[produced]]
    reads = label[graph.inputs.items] >= 0
    read = _find_single(graph.inputs.rows[reads], label[graph.inputs.items[reads]], len(graph))
    member = np.where(read >= 0, read, roles.parameter)
    members = np.flatnonzero(member >= 0).astype(np.int32)
    return members, members[first_equal(member[members])]


def _find_single(nodes: Ints, numbers: Ints, count: int) -> Ints:
    """Return, per node, its only number, -1 for none or several."""
    lowest, highest = np.full(count, np.iinfo(np.int32).max, dtype=np.int32), np.full(count, -1, dtype=np.int32)
    np.minimum.at(lowest, nodes, numbers)
    np.maximum.at(highest, nodes, numbers)
    return np.where(lowest == highest, lowest, -1).astype(np.int32)


class Union:
    """Disjoint sets of nodes; nodes pinned to different devices are not joined.

    `refused_by`: per node, the classes of devices that refuse it, as bits.
    """

    def __init__(self, pinned: Ints, refused_by: Longs | None = None) -> None:
        self._parent = np.arange(len(pinned), dtype=np.int32)
        self._pinned = pinned
        self._refused_by = np.zeros(len(pinned), dtype=np.int64) if refused_by is None else refused_by
        self._reason = np.zeros(len(pinned), dtype=np.int32)
        self._labels = [""]

    def join(
        self, first: NDArray[np.integer], second: NDArray[np.integer], reason: str, *, is_required: bool = False
    ) -> Bools:
        """Join nodes pair by pair; return which pairs are pinned apart. A set keeps its earliest reason.

        Unless `is_required`, sets that other devices refuse stay apart: else one node that an NPU does not take would
        keep all nodes around it from the NPU.
        """
        self._labels.append(reason)
        first, second = first.astype(np.int32), second.astype(np.int32)
        sets = self._parent, self._pinned, self._refused_by, self._reason
        refused: Bools = join_sets(*sets, first, second, len(self._labels) - 1, is_required)
        return refused

    def pin_to(self, node: int, device: int) -> None:
        """Pin the set of a node to a device."""
        self._pinned[find_root(self._parent, node)] = device

    def pin(self, node: int) -> int:
        """Return the device that the set of a node is pinned to, -1 for none."""
        return int(self._pinned[find_root(self._parent, node)])

    def groups(self) -> Groups:
        group, count = number_sets(self._parent)
        roots = np.flatnonzero(self._parent == np.arange(len(group)))
        assert len(roots) == count
        reasons = tuple(self._labels[code] for code in self._reason[roots].tolist())
        return Groups(group, self._pinned[roots], reasons)


def _refusing_classes(profile: Profile) -> Longs:
    """Return, per node, the classes of devices that refuse it, as bits."""
    refused_by = np.zeros(len(profile.graph), dtype=np.int64)
    refusing = [is_refused(seconds) for seconds in profile.seconds.values() if is_refused(seconds).any()]
    for index, is_in in enumerate(refusing):
        refused_by |= is_in.astype(np.int64) << min(index, 62)
    return refused_by


def first_equal(keys: Ints) -> NDArray[np.int64]:
    """Return, for each position, the first one with the same key (0 or more)."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse]


def only_readers(
    graph: OpGraph, seconds: Floats, target: Target, is_counted: Bools, always: bool
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return the nodes that should join their only reader, and those readers.

    A node joins if sending its values would take longer than computing it, or `always`. A constant that costs nothing
    joins the first of its readers.

    Args:
        graph: The graph.
        seconds: [device, node].
        target: Its links are what transfers take.
        is_counted: Per node; other nodes neither join nor read.
        always: Whether nodes join at any cost.
    """
    latency, per_byte = target.remote_link_arrays()
    inputs = graph.inputs.arrays
    lowest, highest, sent_values, sent_bytes = first_readers(graph.producer, graph.value_bytes, *inputs, is_counted)
    # Which devices it will be is not known yet: compare the least compute with the least transfer.
    least_seconds = seconds.min(axis=0)
    transfer = sent_values * latency.min() + sent_bytes * per_byte.min()
    single = (lowest == highest) & (np.True_ if always else least_seconds <= transfer)
    reads = graph.inputs.rows[graph.producer[graph.inputs.items] >= 0]
    constant = least_seconds == 0.0
    constant[reads] = False
    joins = np.flatnonzero((lowest >= 0) & is_counted & (single | (constant & (lowest != highest))))
    return joins, lowest[joins]


def _join_carried_states(union: Union, graph: OpGraph, model: Model, target: Target) -> None:
    """Join the producer of each carried state with its readers in the next call, on whose device it stays.

    Raises:
        UsageError: The device map pins them to different devices.
    """
    index = {name: value for value, name in enumerate(graph.value_names)}
    conflicts = []
    for name, output in model.states.items():
        producer = int(graph.producer[index[model.sources.get(output, output)]])
        readers = graph.readers[index[name]]
        refused = union.join(np.full_like(readers, producer), readers, CARRIED_STATE, is_required=True)
        if refused.any():
            pins = [
                f"node {graph.names[node]!r} to {target.devices[union.pin(node)].id}"
                for node in (producer, int(readers[refused.argmax()]))
            ]
            conflicts.append(
                f"state {output!r} = {name!r} stays on one device, but the device map pins {' and '.join(pins)}"
            )
    if conflicts:
        hint = "pin both to one device, or leave one of them free"
        raise UsageError("U021", format_list(conflicts, "; "), where="--state", hint=hint)


def _pin_to_host(union: Union, graph: OpGraph, model: Model, target: Target) -> list[Diagnostic]:
    """Join producers and readers of values that a GPU cannot hold, and pin them to a host device, if any.

    Between CPU devices alone, such values need no group.
    """
    if all(device.kind == "cpu" for device in target.devices):
        return []
    host_values = list(find_host_values(model))
    for value in host_values:
        first, reason = np.full_like(value.nodes, value.nodes[0]), "values that only a host can hold"
        union.join(first, value.nodes, reason, is_required=True)
    # The first CPU device is the host; groups that are pinned elsewhere stay there.
    host = next((index for index, device in enumerate(target.devices) if device.kind == "cpu"), -1)
    values_by_device: dict[int, list[HostValue]] = {}
    for value in host_values:
        if union.pin(int(value.nodes[0])) < 0 and host >= 0:
            union.pin_to(int(value.nodes[0]), host)
        values_by_device.setdefault(union.pin(int(value.nodes[0])), []).append(value)
    return [_note_host_values(device, values, graph, target) for device, values in values_by_device.items()]


def _note_host_values(device: int, values: Sequence[HostValue], graph: OpGraph, target: Target) -> Diagnostic:
    """Return the note that says which nodes stay together, and why."""
    nodes = sorted({node for value in values for node in value.nodes.tolist()})
    kinds = " and ".join(dict.fromkeys(value.kind for value in values))
    message = (
        f"{len(nodes)} nodes, such as {graph.names[nodes[0]]!r}, stay together: "
        f"a GPU cannot hold the values of type {kinds} that they share, such as {values[0].name!r}"
    )
    if device >= 0 and target.devices[device].kind == "cpu":
        return Diagnostic("G012", message, where=target.devices[device].id)
    where, hint = target.devices[device].id if device >= 0 else "", "add a host device, such as cpu:0"
    return Diagnostic("G012", f"{message}; ONNX Runtime computes them on the host, copying back and forth", where, hint)


def _join_patterns(union: Union, graph: OpGraph, patterns: Sequence[str], removed: Sequence[str]) -> list[Diagnostic]:
    """Join the nodes that each pattern matches; return a note for patterns that match only removed nodes."""
    where, conflicts, unmatched = "--colocate", list[str](), list[str]()
    for pattern, positions in zip(patterns, match_nodes(patterns, graph.names, where)):
        matching = np.array(positions, dtype=np.int32)
        if not len(matching):
            unmatched.append(pattern)
            continue
        first = np.broadcast_to(matching[0], matching.shape)
        refused = union.join(first, matching, f"--colocate {pattern}", is_required=True)
        if refused.any():
            conflicts.append(f"{pattern!r}, with {graph.names[matching[refused.argmax()]]!r}")
    removed_matches = match_removed(unmatched, removed, where)
    if unknown := [pattern for pattern in unmatched if pattern not in removed_matches]:
        listed = format_list(repr(pattern) for pattern in unknown)
        hint = suggest_nodes(unknown[0], graph.names)
        raise UsageError("U020", f"no node or module matches {listed}", where=where, hint=hint)
    if conflicts:
        raise UsageError(
            "U021",
            f"joins nodes that the device map puts on different devices: {format_list(conflicts, '; ')}",
            where=where,
            hint="leave these nodes out of one of the two",
        )
    return [note_removed(removed_matches, where)] if removed_matches else []
