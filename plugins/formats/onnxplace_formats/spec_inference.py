"""Complete the sharding specifications of a model from those of a few of its nodes.

ONNX's proposal of multi-device annotations asks for such a tool: who annotates a model knows how a few products are to
be split, and all else follows from these. It follows by one rule here: of all ways to lay out every value of the model
that agree with what is given, take the one with the shortest step. The pass `shard` makes that choice for the whole
graph at once, by estimated times of nodes and exchanges on equal devices; what is given leaves out strategies of single
nodes. So no value is passed from node to node in an order that could matter, and what is given is never changed.

    given      up: w along axis 1 of 2                   down: nothing
    up         x whole, w axis 1 -> h axis 1             its only way to read w so
    act        h axis 1 -> a axis 1                      anything else would exchange h
    down       a axis 1, w axis 0 -> summands            the weights that fit a's parts: one sum of y, no exchange of a
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

from onnx import ModelProto, NodeProto, ShardingSpecProto, TensorProto

from onnxplace.bundle.manifest import ShardedKindRecord
from onnxplace.errors import Diagnostic, InfeasibleError, InputError, UsageError, format_count
from onnxplace.facts import Shards
from onnxplace.model.device_metadata import ShardedNode, find_entry, read_device_metadata
from onnxplace.model.loading import load, parse_model, read_model_file
from onnxplace.model.lowering import bind
from onnxplace.model.nested_graphs import iterate_initializers, iterate_tensors, walk_graphs
from onnxplace.model.tensors import find_external_file
from onnxplace.passes.sharding.apply.apply_sharding import ShardingOptions, shard_state
from onnxplace.passes.sharding.apply.group_choice import GroupChoice
from onnxplace.passes.sharding.apply.sharding_specs import specify
from onnxplace.passes.sharding.rules.layouts import REPLICATED, Division, Layout
from onnxplace.pipeline.pipeline import Pipeline, make_pass
from onnxplace.problem import fits_single_device
from onnxplace.state import State
from onnxplace.target.machines import parse_machine
from onnxplace.target.target import Target
from onnxplace.utils.files import cannot_write_error, format_path, require_writable, write_file

DEFAULT_DEVICE = "H100-SXM"
"""The devices that times are estimated for, in the catalogue's default fabric."""


@dataclass(frozen=True)
class InferredSpecs:
    """What was inferred; the fields are those of `onnxplace infer-specs --json`."""

    output: str
    """The file that was written."""
    devices: int
    given: int
    """Nodes that had specifications."""
    completed: int
    """Nodes that got their first ones."""
    step_seconds: float
    """Estimated step of the choice; 0 if nothing is split."""
    kinds: tuple[ShardedKindRecord, ...]
    """What is split how, the most expensive operators first."""
    diagnostics: tuple[Diagnostic, ...]


def infer_specs(
    model: Path, output: Path, *, target: Target | None = None, shape: Mapping[str, int] | None = None,
    force: bool = False,
) -> InferredSpecs:  # fmt: skip
    """Write a model with sharding specifications on all nodes: the given ones, and those that complete them best.

    Args:
        model: A model with a device configuration, and with specifications on some nodes.
        output: The file to write; in another folder, files of weights are copied there.
        target: As many devices as the specifications are for; by default `DEFAULT_DEVICE`.
        shape: Sizes of symbolic dimensions.
        force: Replace files that exist.

    Raises:
        InputError: The model has no specifications, or such that no operator can have.
        TargetError: The target has another number of devices.
        InfeasibleError: Even in parts, the model does not fit the devices.
    """
    where = format_path(model)
    proto = parse_model(read_model_file(model), model)
    has_entries = any(node.device_configurations for node in proto.graph.node)
    given = read_device_metadata(model).sharded if has_entries else {}
    ways = _count_devices(given, proto, where)
    files = list_weight_files(proto)
    copies = {} if _is_same_folder(model, output) else {output.parent / name: files[name] for name in files}
    for tensor in copies.values():
        find_external_file(tensor, model.parent)
    weights = (model.parent / location for location in files)
    _require_free(output, list(copies), [model, *filter(os.path.isfile, weights)], force=force)
    target = target or parse_machine(f"{ways}x{DEFAULT_DEVICE}").to_target()
    state, choice = choose_layouts(model, given, target, shape or {})
    entries = _Entries(proto, given, choice, ways)
    for node in proto.graph.node:
        entries.complete(node)
    for copy, tensor in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with find_external_file(tensor, model.parent).open("rb") as source:
            write_file(copy, partial(shutil.copyfileobj, source))
    write_file(output, lambda stream: stream.write(proto.SerializeToString()))
    return InferredSpecs(
        output=str(output),
        devices=ways,
        given=len(given),
        completed=entries.completed,
        step_seconds=state[Shards].seconds,
        kinds=state[Shards].kinds,
        diagnostics=(*state.diagnostics, *entries.note_ignored(where), *entries.note_bare(where)),
    )


def _count_devices(given: Mapping[str, ShardedNode], proto: ModelProto, where: str) -> int:
    """Return how many devices share operators; raises InputError for none, and for several stages."""
    if not given:
        hint = "give a few of its nodes some, such as its products; docs/sharding.md shows how"
        raise InputError("U023", "no node of this model has a sharding specification", where=where, hint=hint)
    if not proto.configuration:
        hint = "ModelProto.configuration says how many devices there are; docs/sharding.md shows how to add it"
        raise InputError("U023", "the model has no device configuration", where=where, hint=hint)
    ways = max(len(item.devices) for item in given.values())
    first = proto.configuration[0]
    if ways != (count := max(first.num_devices, len(first.device))):
        message = (
            f"operators are on {format_count(ways, 'device')} at most, and configuration {first.name!r} has {count}"
        )
        hint = "stages are not inferred: give a model of one stage, and all of its devices to an operator"
        if ways == 1:
            hint = "let a node share its work: the specification of a tensor names several devices"
        raise InputError("U023", message, where=where, hint=hint)
    return ways


def _require_free(output: Path, copies: Sequence[Path], sources: Sequence[Path], *, force: bool) -> None:
    """Raise UsageError unless files can be written, none overwrites another, and they may be replaced if they exist."""
    require_writable(output, *sources)
    if output.resolve() in [copy.resolve() for copy in copies]:
        raise cannot_write_error("the weights of the model are copied to a file of this name", output)
    for file in (output, *copies):
        if not force and os.path.lexists(file):
            hint = "choose another -o, or replace it with --force"
            raise UsageError("U030", "it already exists", where=format_path(file), hint=hint)


def choose_layouts(
    path: Path, given: Mapping[str, ShardedNode], target: Target, shape: Mapping[str, int]
) -> tuple[State, GroupChoice | None]:
    """Return the state after the pass `shard`, and its choice; None if every operator stays whole.

    Raises InfeasibleError if the model does not fit the devices.
    """
    model = bind(load(path, may_lack_weights=True), shape, {})
    steps = Pipeline((make_pass("optimize"), make_pass("profile", {"estimate": True, "cache": False})))
    profiled, _ = steps.run(State(target).with_facts(model))
    state = shard_state(profiled, ShardingOptions(exact=True, map=str(path), given=given))
    choice = state[Shards].choice
    if choice is None and not fits_single_device(profiled).any():
        raise InfeasibleError("P002", state.diagnostics[-1].message, where=model.name, hint="name larger devices")
    assert choice is None or isinstance(choice, GroupChoice)
    return state, choice


class _Entries:
    """Completes the configurations of nodes, and counts those that had none."""

    def __init__(
        self, proto: ModelProto, given: Mapping[str, ShardedNode], choice: GroupChoice | None, ways: int
    ) -> None:
        self._nodes, self._configurations = proto.graph.node, proto.configuration
        self._functions = {(item.domain, item.name) for item in proto.functions}
        self._choice, self._division = choice, choice.space.division if choice else Division((1.0,) * ways)
        model = choice.space.facts.model if choice else None
        # Unnamed nodes get names when a model is read, so values identify them.
        self._devices = {name: item.devices for item in given.values() for name in item.node.output}
        nodes = enumerate(model.nodes if model else ())
        self._numbers = {name: index for index, node in nodes for name in filter(None, node.output)}
        self.completed = 0

    def note_ignored(self, where: str) -> Iterator[Diagnostic]:
        """Yield a note on nodes whose specifications do not count."""
        nested = (node for graph in walk_graphs(self._nodes) for node in graph.node)
        nodes = [*nested, *filter(self._is_call, self._nodes)]
        if ignored := [node.name or node.op_type for node in nodes if node.device_configurations]:
            message = f"those of {format_count(len(ignored), 'node')} in subgraphs, or calls of functions, do not count"
            yield Diagnostic("U025", f"{message}, such as of {ignored[0]!r}", where=where)

    def note_bare(self, where: str) -> Iterator[Diagnostic]:
        """Yield notes on nodes without specifications."""
        bare = [node for node in self._nodes if not node.device_configurations]
        if calls := [node.op_type for node in bare if self._is_call(node)]:
            message = f"{format_count(len(calls), 'call')} of functions got none, such as {calls[0]!r}"
            hint = "onnx.inliner.inline_local_functions replaces them by their operators"
            yield Diagnostic("U025", message, where=where, hint=hint)
        if others := [node.name or node.op_type for node in bare if not self._is_call(node)]:
            message = f"{format_count(len(others), 'node')} got none, such as {others[0]!r}"
            message += ": ONNX has no words for summands, nor for rows that are not valid"
            yield Diagnostic("U025", message, where=where)

    def _is_call(self, node: NodeProto) -> bool:
        """Return whether a node calls a function of the model, whose operators have layouts of their own."""
        return (node.domain, node.op_type) in self._functions

    def complete(self, node: NodeProto) -> None:
        """Add the specifications that a node lacks."""
        entry = find_entry(node, self._configurations)
        known = {spec.tensor_name for spec in entry.sharding_spec} if entry else set[str]()
        specs = [] if self._is_call(node) else [item for item in self._specify(node) if item.tensor_name not in known]
        if specs:
            entry = entry or node.device_configurations.add(configuration_id=self._configurations[0].name)
            entry.sharding_spec.extend(specs)
            self.completed += not known

    def _specify(self, node: NodeProto) -> Iterator[ShardingSpecProto]:
        """Yield the specifications of a node's values, as far as ONNX can express them."""
        names = (*node.input, *node.output)
        number = next((self._numbers[name] for name in node.output if name in self._numbers), None)
        # Constants, and what is computed from these alone, are on every device; nothing reads what has no layout.
        layouts: Sequence[Layout | None] = [REPLICATED] * len(names)
        shapes: Sequence[Sequence[int]] = [()] * len(names)
        if self._choice and number is not None:
            facts, strategy = self._choice.space.facts, self._choice.choice.strategies[number]
            layouts = (*strategy.inputs[: len(node.input)], *strategy.outputs)
            own = facts.model.nodes[number]
            shapes = [facts.shapes.get(name, ()) for name in (*own.input, *own.output)]
        # What is on some of the devices alone, is there as a whole.
        devices = next((self._devices[name] for name in node.output if name in self._devices), ())
        for name, (layout, shape) in dict(zip(names, zip(layouts, shapes))).items():
            if (spec := specify(name, layout, shape, self._division, devices)) is not None:
                yield spec


def list_weight_files(proto: ModelProto) -> dict[str, TensorProto]:
    """Return the files of a model's weights, as it names them, each with one of its tensors."""
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    tensors = [*iterate_initializers(proto.graph), *(tensor for node in nodes for tensor in iterate_tensors(node))]
    external = [tensor for tensor in tensors if tensor.data_location == TensorProto.EXTERNAL]
    locations = [{entry.key: entry.value for entry in tensor.external_data}.get("location", "") for tensor in external]
    return dict(sorted(zip(locations, external), key=itemgetter(0)))


def _is_same_folder(first: Path, second: Path) -> bool:
    return first.absolute().parent.resolve() == second.absolute().parent.resolve()
