"""The policy of `guided`: what it sees of a problem, its network, the list schedules that it decides, and its files.

No feature depends on the names, the number or the order of devices. The network embeds the nodes once per graph; in a
list schedule, a small second network then scores each device alone for the group that is being placed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.errors import InputError
from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, sum_by
from onnxplace.passes.placement.list_scheduling.sct_favourites import transfer_edges
from onnxplace.passes.placement.search.heft_kernels import empty_plan
from onnxplace.passes.placement.search.placement_search import Candidate, SearchSpace, evaluate_candidate
from onnxplace.passes.placement.search.portfolio import PlacerPlan
from onnxplace.problem import PlacementProblem, interchangeable_devices
from onnxplace.utils.files import format_path
from onnxplace_learned.policies.guided_kernels import (
    DEVICE_FEATURES,
    Choice,
    ListInputs,
    ListScratch,
    ScheduleTrace,
    fill_levels,
    mean_neighbours,
    schedule_by_policy,
)
from onnxplace_learned.policies.placeto_kernels import Singles
from onnxplace_learned.policy_files import MAX_SIZES, PolicyFile, write_policy_file

NODE_FEATURES, GROUP_FEATURES, PAIR_FEATURES = 17, 2, 5
# How the group of a pair is related to its neighbour.
READS, IS_READ, READS_THE_SAME, READ_BY_THE_SAME = range(4)
# Share of a transfer in the order of placing: edges are local about half of the time.
TRANSFER_SHARE = 0.5


@dataclass(frozen=True)
class Pairs:
    """Neighbours of each group: those that it reads or that read it, and those next to it at the same value."""

    starts: Longs
    """Per group."""
    groups: Ints
    """Per pair, the group that is being placed."""
    neighbours: Ints
    features: Singles
    """[pair, feature]."""


@dataclass(frozen=True)
class GuidedGraph:
    """A problem with the arrays that a policy reads."""

    problem: PlacementProblem

    @cached_property
    def space(self) -> SearchSpace:
        return SearchSpace(self.problem)

    @cached_property
    def interchangeable(self) -> Ints:
        """Return, per device, the first device that it is interchangeable with."""
        return interchangeable_devices(self.problem)

    @cached_property
    def least_seconds(self) -> Floats:
        """Return the seconds of each node on its fastest device."""
        least: Floats = np.ascontiguousarray(self.problem.seconds.min(axis=0))
        return least

    @cached_property
    def value_seconds(self) -> Floats:
        """Return the seconds to send each value over the mean link."""
        latency, per_byte = self.problem.target.link_arrays()
        remote = ~np.eye(len(latency), dtype=bool)
        if not remote.any():
            return np.zeros(len(self.problem.graph.value_bytes))
        seconds: Floats = latency[remote].mean() + self.problem.graph.value_bytes * per_byte[remote].mean()
        return seconds

    @cached_property
    def fair_seconds(self) -> float:
        """Return the work of each device if all had the same."""
        return max(float(self.least_seconds.sum()) / len(self.problem.target.devices), 1e-30)

    def levels(self, transfer_share: float) -> tuple[Floats, Floats]:
        """Return the longest path to the start of each node, and from there to the end."""
        top, bottom = np.zeros((2, len(self.problem.graph)))
        fill_levels(self.space.wiring, self.least_seconds, transfer_share * self.value_seconds, top, bottom)
        return top, bottom

    @cached_property
    def order(self) -> Ints:
        """Return the nodes in the order of placing: by bottom level, the longest path first."""
        _, bottom = self.levels(TRANSFER_SHARE)
        return np.lexsort((self.problem.graph.positions, -bottom)).astype(np.int32)

    @cached_property
    def node_features(self) -> Singles:
        """Return what the policy knows of each node: [node, feature], all between 0 and about 1."""
        graph, least, fair = self.problem.graph, self.least_seconds, self.fair_seconds
        count, devices = len(graph), len(self.problem.target.devices)
        mean = max(float(least.mean()) if count else 0.0, 1e-30)
        read = np.flatnonzero((graph.producer >= 0) & (np.diff(graph.readers.starts) > 0))
        transfer = sum_by(graph.producer[read], self.value_seconds[read], count)
        top, bottom = self.levels(0.0)
        far_top, far_bottom = self.levels(1.0)
        longest = max(float((top + bottom).max(initial=0.0)), 1e-30)
        farthest = max(float((far_top + far_bottom).max(initial=0.0)), 1e-30)
        middle, last = top + least / 2, longest - bottom + least / 2
        stored = sum_by(graph.weights.rows, graph.weight_bytes[graph.weights.items], count)
        whole = [
            np.full(count, number)
            for number in (1 / devices, fair / (fair + longest), 1 - 1 / (1 + transfer.sum() / (devices * fair)))
        ]
        columns = [
            _squash(least / mean),
            _squash(20 * least / fair),
            _squash(transfer / mean),
            transfer / (transfer + least + 1e-30),
            top / longest,
            bottom / longest,
            (top + bottom) / longest,
            (far_top + far_bottom) / farthest,
            far_bottom / farthest,
            _squash(np.diff(graph.predecessors.starts) / 2),
            _squash(np.diff(graph.successors.starts) / 2),
            _squash(_count_concurrent(top, top + least, middle) / devices),
            _squash(_count_concurrent(longest - bottom, longest - bottom + least, last) / devices),
            np.minimum(stored / max(float(self.problem.limit_bytes.min(initial=1)), 1.0), 1.0),
            *whole,
        ]
        return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.float32)

    @cached_property
    def group_seconds(self) -> Floats:
        return sum_by(self.problem.group.astype(np.int32), self.least_seconds, len(self.problem.pinned))

    @cached_property
    def group_sizes(self) -> Longs:
        return np.bincount(self.problem.group, minlength=len(self.problem.pinned)).astype(np.int64)

    @cached_property
    def group_features(self) -> Singles:
        """Return what the policy knows of each group: [group, feature]."""
        columns = [_squash(20 * self.group_seconds / self.fair_seconds), _squash((self.group_sizes - 1) / 2)]
        return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.float32)

    @cached_property
    def pairs(self) -> Pairs:
        """Return the neighbours of each group."""
        graph, group, count = self.problem.graph, self.problem.group.astype(np.int64), len(self.problem.pinned)
        edges = transfer_edges(self.problem)
        inner = graph.producer[graph.readers.rows] >= 0
        same_value = _list_consecutive(graph.readers.rows[inner], graph.readers.items[inner])
        same_reader = _list_consecutive(graph.predecessors.rows, graph.predecessors.items)
        nothing = (np.zeros(len(same_value[0])), np.zeros(len(same_reader[0])))
        parts = [
            (READS, edges.destination, edges.source, edges.seconds),
            (IS_READ, edges.source, edges.destination, edges.seconds),
            (READS_THE_SAME, *same_value, nothing[0]),
            (READS_THE_SAME, *same_value[::-1], nothing[0]),
            (READ_BY_THE_SAME, *same_reader, nothing[1]),
            (READ_BY_THE_SAME, *same_reader[::-1], nothing[1]),
        ]
        key = np.concatenate([4 * (group[own] * count + group[other]) + kind for kind, own, other, _ in parts])
        key, index = np.unique(key, return_inverse=True)
        seconds = np.bincount(index, np.concatenate([part[3] for part in parts]), len(key))
        own, other, kind = key // 4 // max(count, 1), key // 4 % max(count, 1), key % 4
        apart = own != other
        own, other, kind, seconds = own[apart], other[apart], kind[apart], seconds[apart]
        mean = max(float(self.least_seconds.mean()) if len(graph) else 0.0, 1e-30)
        features = np.column_stack([kind == number for number in range(4)] + [_squash(seconds / mean)])
        return Pairs(
            starts=np.searchsorted(own, np.arange(count + 1)).astype(np.int64),
            groups=own.astype(np.int32),
            neighbours=other.astype(np.int32),
            features=np.ascontiguousarray(features, dtype=np.float32),
        )

    @cached_property
    def list_inputs(self) -> ListInputs:
        """Return the problem as list schedules read it."""
        problem, graph = self.problem, self.problem.graph
        group = problem.group.astype(np.int32)
        weights = Csr.grouped(group[graph.weights.rows], graph.weights.items, len(problem.pinned))
        return ListInputs(
            order=self.order,
            group=group,
            pinned=problem.pinned.astype(np.int32),
            weight_starts=weights.starts,
            weights=weights.items,
            weight_bytes=graph.weight_bytes,
            least_seconds=self.least_seconds,
            group_seconds=self.group_seconds,
            fair_seconds=np.array([self.fair_seconds]),
        )

    def new_trace(self) -> ScheduleTrace:
        """Return an empty record of decisions."""
        groups, devices = len(self.problem.pinned), len(self.problem.target.devices)
        return ScheduleTrace(
            features=np.zeros((groups, devices, DEVICE_FEATURES), dtype=np.float32),
            allowed=np.zeros((groups, devices), dtype=bool),
            rank=np.full(groups, -1, dtype=np.int32),
            choice=np.full(groups, -1, dtype=np.int32),
        )


def new_list_scratch(devices: int, message_width: int, hidden: int) -> ListScratch:
    """Return arrays for list schedules."""
    return ListScratch(
        work=np.zeros(devices),
        begin=np.zeros(devices),
        finish=np.zeros(devices),
        incoming=np.zeros(devices),
        needed=np.zeros(devices, dtype=np.int64),
        heard=np.zeros((devices, message_width), dtype=np.float32),
        heard_by_all=np.zeros(message_width, dtype=np.float32),
        hidden=np.zeros(hidden, dtype=np.float32),
        scores=np.zeros(devices, dtype=np.float32),
    )


def _squash(amounts: Floats) -> Floats:
    """Map numbers from 0 on to numbers from 0 to 1; 1 becomes a half."""
    return amounts / (1.0 + amounts)


def _count_concurrent(begin: Floats, finish: Floats, moments: Floats) -> Floats:
    """Return how many intervals contain each moment."""
    started = np.searchsorted(np.sort(begin), moments, side="right")
    ended = np.searchsorted(np.sort(finish), moments, side="right")
    counts: Floats = np.maximum(started - ended, 0).astype(np.float64)
    return counts


def _list_consecutive(rows: Ints, items: Ints) -> tuple[Ints, Ints]:
    """Return the pairs of items that follow each other in the same row."""
    same = rows[1:] == rows[:-1]
    return items[:-1][same], items[1:][same]


# Sizes of embeddings, of messages of neighbours and of the layer before a score; rounds of the graph network.
WIDTH, MESSAGE_WIDTH, HIDDEN, ROUNDS = 24, 16, 32, 4
Tensors = Mapping[str, Singles]


@dataclass(frozen=True)
class GuidedShape:
    """The sizes of the network."""

    width: int = WIDTH
    message_width: int = MESSAGE_WIDTH
    hidden: int = HIDDEN
    rounds: int = ROUNDS

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name: weights [input, output], biases [output]."""
        width, message = self.width, self.message_width
        shapes: dict[str, tuple[int, ...]] = {"encode.weight": (NODE_FEATURES, width), "encode.bias": (width,)}
        for index in range(self.rounds):
            for part in ("own", "before", "after"):
                shapes[f"round{index}.{part}"] = (width, width)
            shapes[f"round{index}.bias"] = (width,)
        return shapes | {
            "group.embedding": (width, self.hidden),
            "group.features": (GROUP_FEATURES, self.hidden),
            "group.bias": (self.hidden,),
            "message.own": (width, message),
            "message.neighbour": (width, message),
            "message.pair": (PAIR_FEATURES, message),
            "message.bias": (message,),
            "device.own": (message, self.hidden),
            "device.all": (message, self.hidden),
            "device.features": (DEVICE_FEATURES, self.hidden),
            "device.output": (self.hidden,),
        }

    def draw_tensors(self, seed: int) -> dict[str, Singles]:
        """Return random weights as He et al. (2015) draw them, and biases of zero."""
        rng = np.random.default_rng(seed)
        drawn = {}
        for name, shape in self.tensors.items():
            scale = 0.0 if name.endswith("bias") else np.sqrt(1.0 / shape[0])
            drawn[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
        return drawn


@dataclass(frozen=True)
class GuidedPolicy:
    """A trained policy: its network, and what it was trained on."""

    shape: GuidedShape
    tensors: Tensors
    families: str = ""
    """The graphs that it was trained on."""
    graphs: int = 0
    """How many they were."""
    devices: int = 0
    """The most devices that they had; any number can be placed on."""
    steps: int = 0
    """Number of steps of its training."""
    seed: int = 0

    def with_tensors(self, tensors: Tensors, steps: int) -> GuidedPolicy:
        """Return this policy after further training."""
        return replace(self, tensors=dict(tensors), steps=steps)

    def embed(self, graph: GuidedGraph) -> Singles:
        """Return the embedding of each node after all rounds: [node, width]."""
        tensors, before, after = self.tensors, graph.problem.graph.predecessors, graph.problem.graph.successors
        current = _relu(graph.node_features @ tensors["encode.weight"] + tensors["encode.bias"])
        for index in range(self.shape.rounds):
            heard = (
                current @ tensors[f"round{index}.own"]
                + _mean(before, current) @ tensors[f"round{index}.before"]
                + _mean(after, current) @ tensors[f"round{index}.after"]
                + tensors[f"round{index}.bias"]
            )
            current = current + _relu(heard)
        return current

    def prepare(self, graph: GuidedGraph) -> Choice:
        """Return what choosing devices for a graph needs: it is computed once for all schedules."""
        tensors, pairs, group = self.tensors, graph.pairs, graph.problem.group
        embedding = np.zeros((len(graph.group_sizes), self.shape.width), dtype=np.float32)
        np.add.at(embedding, group, self.embed(graph))
        embedding /= np.maximum(graph.group_sizes, 1)[:, None].astype(np.float32)
        hidden = embedding @ tensors["group.embedding"] + graph.group_features @ tensors["group.features"]
        messages = (
            (embedding @ tensors["message.own"])[pairs.groups]
            + (embedding @ tensors["message.neighbour"])[pairs.neighbours]
            + pairs.features @ tensors["message.pair"]
            + tensors["message.bias"]
        )
        counts = np.diff(pairs.starts)[pairs.groups].astype(np.float32)
        return Choice(
            group_hidden=np.ascontiguousarray(hidden + tensors["group.bias"], dtype=np.float32),
            messages=np.ascontiguousarray(_relu(messages) / counts[:, None], dtype=np.float32),
            pair_starts=pairs.starts,
            neighbours=pairs.neighbours,
            own_weights=tensors["device.own"],
            all_weights=tensors["device.all"],
            feature_weights=tensors["device.features"],
            output=tensors["device.output"],
        )


def run_schedule(
    graph: GuidedGraph, choice: Choice, draws: Floats | None = None, forced: Ints | None = None
) -> tuple[Ints, ScheduleTrace] | None:
    """Return the devices of a list schedule and its decisions; None where a group has no room anywhere.

    Args:
        graph: What to place.
        choice: Of the policy for this graph.
        draws: Numbers from 0 to 1, one per group, to sample devices; without them, the best are taken.
        forced: Devices of groups to take instead; the decisions are recorded as if the policy had made them.
    """
    groups = len(graph.problem.pinned)
    plan, trace = empty_plan(graph.problem), graph.new_trace()
    decisions = schedule_by_policy(
        graph.space.wiring,
        graph.list_inputs,
        choice,
        np.full(groups, -1.0) if draws is None else draws,
        np.full(groups, -1, dtype=np.int32) if forced is None else forced,
        plan,
        _new_scratch(graph, choice),
        trace,
    )
    return None if decisions < 0 else (plan.device, trace)


def _new_scratch(graph: GuidedGraph, choice: Choice) -> ListScratch:
    return new_list_scratch(len(graph.problem.target.devices), len(choice.own_weights), len(choice.output))


def _relu(numbers: Singles) -> Singles:
    return np.maximum(numbers, np.float32(0.0))


def _mean(neighbours: Csr, embedding: Singles) -> Singles:
    means = np.zeros_like(embedding)
    mean_neighbours(neighbours.starts, neighbours.items, embedding, means)
    return means


def plan_with_policy(
    problem: PlacementProblem, policy: GuidedPolicy, schedules: int, seed: int, name: str
) -> list[PlacerPlan]:
    """Return the placements of a policy that fit, each once, the shortest step first.

    The first of `schedules` list schedules takes the best device each time; the others sample devices under `seed`.
    """
    graph, candidates = GuidedGraph(problem), dict[bytes, Candidate]()
    choice, rng = policy.prepare(graph), np.random.default_rng(seed)
    for index in range(schedules):
        schedule = run_schedule(graph, choice, rng.random(len(problem.pinned)) if index else None)
        if schedule is None:
            continue
        device = schedule[0]
        if (key := device.tobytes()) not in candidates and (candidate := evaluate_schedule(graph, device, name)):
            candidates[key] = candidate
    best = sorted(candidates.values(), key=lambda candidate: candidate.seconds)
    return [PlacerPlan(candidate.name, candidate.device, candidate.order) for candidate in best]


def evaluate_schedule(graph: GuidedGraph, device: Ints, name: str = "") -> Candidate | None:
    """Return a placement with its step, in the better of two orders; None if it does not fit."""
    return evaluate_candidate(graph.space, name, device, graph.order)


KIND = "guided"
# Adam's moments of each parameter in a checkpoint, as torch names them.
MOMENTS = ("exp_avg", "exp_avg_sq")
# The metadata of a checkpoint: all of it besides moments, as JSON.
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class GuidedCheckpoint:
    """What the training of a policy is resumed from, next to the policy itself."""

    updates: int
    """Updates of the optimiser; 0 if it has no moments yet."""
    random_state: Mapping[str, Any]
    """State of numpy's generator PCG64."""
    recent: Sequence[tuple[float, float]]
    """Losses and shares of right decisions since the last point."""
    moments: Tensors
    """The moments of each parameter."""


def default_policy_path() -> Path:
    """Return the file of the policy that comes with the package."""
    return Path(str(files("onnxplace_learned.policies"))) / "guided.safetensors"


def write_guided_policy(path: Path, policy: GuidedPolicy, checkpoint: GuidedCheckpoint | None = None) -> None:
    """Write a policy; with a checkpoint, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    tensors, more = dict(policy.tensors), {}
    if checkpoint:
        tensors |= checkpoint.moments
        state = {name: getattr(checkpoint, name) for name in ("updates", "random_state", "recent")}
        more = {CHECKPOINT: json.dumps(state)}
    write_policy_file(path, KIND, (policy.shape, policy), tensors, more)


def read_guided_policy(path: Path) -> GuidedPolicy:
    """Return the policy in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not a policy of `guided`, or is of a newer version.
    """
    return _read_file(path)[0]


def read_guided_checkpoint(path: Path) -> tuple[GuidedPolicy, GuidedCheckpoint]:
    """Return the policy in a checkpoint, and what its training is resumed from.

    Raises:
        InputError: As `read_guided_policy`; or the file is a policy without a checkpoint.
    """
    policy, checkpoint = _read_file(path)
    if checkpoint is None:
        hint = "omit --resume to start anew"
        raise InputError("H012", "expected a checkpoint, found a policy alone", where=format_path(path), hint=hint)
    return policy, checkpoint


def _read_file(path: Path) -> tuple[GuidedPolicy, GuidedCheckpoint | None]:
    """Return the policy in a file, and its checkpoint if there is one."""
    file = PolicyFile(path, KIND)
    shape = GuidedShape(**file.read_fields(GuidedShape, MAX_SIZES))
    updates, recent = 0, list[tuple[float, float]]()
    random_state: Any = None
    if CHECKPOINT in file.metadata:
        try:
            state = json.loads(file.metadata[CHECKPOINT])
            updates, random_state = int(state["updates"]), state["random_state"]
            recent = [(float(loss), float(right)) for loss, right in state["recent"]]
            np.random.PCG64().state = random_state
        except (KeyError, ValueError, TypeError) as problem:
            raise file.damage(f"its checkpoint cannot be read ({problem})") from None
    moments = {f"{moment}.{name}": size for moment in MOMENTS for name, size in shape.tensors.items() if updates}
    tensors = file.read_tensors({**shape.tensors, **moments})
    policy = GuidedPolicy(shape, {name: tensors[name] for name in shape.tensors}, **file.read_fields(GuidedPolicy))
    if CHECKPOINT not in file.metadata:
        return policy, None
    return policy, GuidedCheckpoint(updates, random_state, recent, {name: tensors[name] for name in moments})
