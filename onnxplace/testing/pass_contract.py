"""Contract tests for passes and runtimes, with random graphs and states.

A plugin's whole test suite may be

    from onnxplace.testing import check_pass, check_runtime

    def test_my_placer_keeps_the_contract():
        check_pass(MyPlacer)

    def test_my_runtime_keeps_the_contract():
        check_runtime(MyRuntime)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import permutations, product
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Clusters, Groups, Placement, Profile, Schedule, Source
from onnxplace.graph.op_graph import Csr, OpGraph, number_densely
from onnxplace.pipeline.pipeline import make_pass as make_named_pass, run_pass
from onnxplace.pipeline.text_form import build_pass, make_spec, parse_pipeline
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.simulation.simulator import simulate
from onnxplace.state import Pass, State
from onnxplace.target.target import LINK_MODELS, Device, Link, LinkModel, Target
from onnxplace.testing.runtime_contract import require

# All random times are multiples of this power of two, so that their sums are exact in any order.
TICK_SECONDS = 2.0**-20
# Memory of random devices: more than any random graph needs.
AMPLE_BYTES = 1 << 40

_RANDOM_FACTS = (Profile, Groups, Clusters, Placement, Schedule)


def random_graph(seed: int, nodes: int = 24, *, views: float = 0.2, shuffled: bool = False) -> OpGraph:
    """Return a random operator graph, the same for the same arguments.

    It has graph inputs, nodes with zero to three outputs that share weights, values with several readers and with none,
    graph outputs, workspace, and views (a share `views` of the nodes with inputs). Nodes are numbered in topological
    order unless `shuffled`; a view always has a higher index than the value it refers to.

    >>> len(random_graph(seed=7, nodes=5))
    5
    """
    random = np.random.default_rng(seed)
    input_count = int(random.integers(1, 4))
    producer, alias = [-1] * input_count, [-1] * input_count
    sizes = random.integers(0, 4096, input_count).tolist()
    weight_bytes = random.integers(0, 4096, 1 + nodes // 3)
    order = random.permutation(nodes) if shuffled else np.arange(nodes)
    reads: list[list[int]] = [[] for _ in range(nodes)]
    for node in order.tolist():
        reads[node] = _draw_recent(random, len(producer), int(random.choice(5, p=[0.08, 0.37, 0.3, 0.15, 0.1])))
        for position in range(int(random.choice(4, p=[0.05, 0.6, 0.2, 0.15]))):
            is_view = position == 0 and len(reads[node]) > 0 and random.random() < views
            producer.append(node)
            alias.append(reads[node][0] if is_view else -1)
            sizes.append(sizes[reads[node][0]] if is_view else int(random.integers(0, 4096)))
    is_read = np.isin(np.arange(len(producer)), [value for row in reads for value in row])
    returned = random.random(len(producer)) < np.where(is_read, 0.1, 0.6)
    return OpGraph(
        names=tuple(f"node{i}" for i in range(nodes)),
        ops=tuple(f"Op{i % 5}" for i in range(nodes)),
        value_names=tuple(f"value{i}" for i in range(len(producer))),
        value_bytes=np.array(sizes, dtype=np.int64),
        producer=np.array(producer, dtype=np.int32),
        is_output=returned & (np.array(producer) >= 0),
        alias=np.array(alias, dtype=np.int32),
        inputs=Csr.of(reads),
        weight_names=tuple(f"weight{i}" for i in range(len(weight_bytes))),
        weight_bytes=weight_bytes,
        weights=Csr.of([_draw_distinct(random, len(weight_bytes), int(random.integers(0, 3))) for _ in range(nodes)]),
        workspace_bytes=random.integers(0, 4096, nodes) * (random.random(nodes) < 0.4),
    )


def _draw_distinct(random: np.random.Generator, below: int, count: int) -> list[int]:
    return [int(item) for item in random.permutation(below)[:count]]


def _draw_recent(random: np.random.Generator, below: int, count: int) -> list[int]:
    """Draw distinct values, most of them recent, for deep and wide graphs."""
    near = below - np.minimum(random.geometric(0.3, count), below)
    anywhere = random.integers(0, below, count)
    return list(dict.fromkeys(np.where(random.random(count) < 0.8, near, anywhere).tolist()))


def random_target(
    seed: int, devices: int = 3, *, link_model: LinkModel | None = None, memory_bytes: int = AMPLE_BYTES
) -> Target:
    """Return a random target with devices of up to three cost classes.

    Each two devices have their own link. `link_model` is drawn too unless it is given. Transfers take whole multiples
    of `TICK_SECONDS`, or power-of-two fractions of it, so that simulated times are exact.
    """
    random = np.random.default_rng(seed)
    classes = (("cpu", 1, ""), ("cpu", 2, ""), ("cuda", 1, "Random"))
    device_kinds = [classes[int(random.integers(0, len(classes)))] for _ in range(devices)]
    ids = [f"{kind}:{index}" for index, (kind, _, _) in enumerate(device_kinds)]
    return Target(
        tuple(Device(name, memory_bytes, cores, model) for name, (_, cores, model) in zip(ids, device_kinds)),
        tuple(
            Link(a, b, int(random.integers(0, 64)) * TICK_SECONDS, 2.0 ** int(random.integers(23, 32)))
            for a, b in permutations(ids, 2)
        ),
        link_model or LINK_MODELS[int(random.integers(0, len(LINK_MODELS)))],
    )


def random_state(
    seed: int,
    nodes: int = 24,
    devices: int = 3,
    *,
    facts: Collection[type] = (Profile,),
    tight: bool = False,
    pinned: bool = False,
    shuffled: bool = False,
) -> State:
    """Return a random state with the given `facts` and a Profile.

    `facts` may name Groups, Clusters, Placement and Schedule. Each device has room for everything, or, if `tight`, for
    a part, which may be too small. With `pinned`, some groups are pinned to devices. A random placement respects pins
    and groups, but not memory limits.
    """
    random = np.random.default_rng(seed)
    graph = random_graph(seed, nodes, shuffled=shuffled)
    memory = int(_sum_bytes(graph) * (random.uniform(0.2, 0.9) if tight else 1))
    target = random_target(seed, devices, memory_bytes=memory)
    state = State(target).with_facts(_random_profile(random, graph, target))
    if not {Groups, Clusters}.isdisjoint(facts):
        state = state.with_facts(_random_groups(random, graph, devices if pinned else 0))
    if Clusters in facts:
        state = run_pass(make_named_pass("fuse"), state)
    if not {Placement, Schedule}.isdisjoint(facts):
        state = _place_randomly(random, state)
    return state


def _sum_bytes(graph: OpGraph) -> int:
    """Return an upper bound of the bytes on any device."""
    return int(graph.value_bytes.sum() + graph.weight_bytes.sum() + graph.workspace_bytes.sum())


def _random_profile(random: np.random.Generator, graph: OpGraph, target: Target) -> Profile:
    """Return costs, a quarter of them zero, and units that join neighbours."""
    free = random.random(len(graph)) < 0.25
    classes = dict.fromkeys(device.cost_class for device in target.devices)
    unit = list(range(len(graph)))
    for node in graph.order.tolist():
        before = graph.predecessors[node]
        if len(before) and random.random() < 0.15:
            unit[node] = unit[int(before[0])]
    return Profile(
        graph,
        MappingProxyType(
            {name: np.where(free, 0, random.integers(1, 400, len(graph))) * TICK_SECONDS for name in classes}
        ),
        MappingProxyType({name: np.where(free, Source.KNOWN, Source.ESTIMATED).astype(np.uint8) for name in classes}),
        number_densely(unit),
    )


def _random_groups(random: np.random.Generator, graph: OpGraph, pins: int) -> Groups:
    """Return groups of adjacent and of distant nodes.

    Pin a fifth of them.
    `pins` is the number of devices for pins; 0 pins none.
    """
    representative = list(range(len(graph)))
    for node in graph.order.tolist():
        before = graph.predecessors[node]
        if len(before) and random.random() < 0.5:
            representative[node] = representative[int(random.choice(before))]
        elif random.random() < 0.1:
            representative[node] = representative[int(random.integers(0, len(graph)))]
    group = number_densely(representative)
    count = int(group.max(initial=-1)) + 1
    pinned = np.full(count, -1)
    if pins:
        pinned = np.where(random.random(count) < 0.2, random.integers(0, pins, count), pinned)
    return Groups(group, pinned.astype(np.int32), ("random",) * count)


def _place_randomly(random: np.random.Generator, state: State) -> State:
    profile, target = state[Profile], state.target
    graph = profile.graph
    device = random.integers(0, len(target.devices), len(graph)).astype(np.int32)
    if Groups in state:
        home = random.integers(0, len(target.devices), len(state[Groups].pinned))
        device = np.where(state[Groups].pinned >= 0, state[Groups].pinned, home)[state[Groups].group].astype(np.int32)
    seconds = np.stack([profile.seconds[item.cost_class] for item in target.devices])
    simulation = simulate(graph, seconds, target, device, graph.order)
    return state.with_facts(
        Placement(device, "random"), Schedule(graph.order, simulation, lower_bound_seconds(graph, seconds))
    )


def check_pass(make_pass: Callable[[], Pass], states: Iterable[State] | None = None) -> None:
    """Raise AssertionError unless a pass keeps the contract of passes.

    It runs on each of `states`, by default random ones. The pass must be a frozen dataclass whose options survive the
    text of pipelines. It must provide just what it declares, keep the invariants of its facts, leave its input
    unchanged, and return equal results for equal inputs. A placer may raise InfeasibleError unless every device has
    room for everything and no group is pinned.

    >>> from onnxplace.pipeline import make_pass
    >>> check_pass(lambda: make_pass("m-topo"))
    """
    step = make_pass()
    _check_options(step)
    for number, state in enumerate(_random_states(step) if states is None else states):
        where = f"pass {step.name!r}, state {number}"
        before = _describe(state)
        first = _apply_pass(make_pass(), state, where)
        changes = _list_differences(before, _describe(state))
        require(not changes, f"{where}: it altered its input: {changes}")
        require(isinstance(first, str) or first.target == state.target, f"{where}: it changed the target")
        second = _apply_pass(make_pass(), state, where)
        differing = _list_differences(_describe(first), _describe(second))
        require(not differing, f"{where}: equal inputs gave results that differ in {differing}")


def _check_options(step: Pass) -> None:
    kind = type(step)
    require(isinstance(step, Pass), f"{kind.__name__} is not a Pass")
    frozen = is_dataclass(step) and "__dataclass_params__" in vars(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    require(frozen, f"{kind.__name__} itself is not a frozen dataclass")
    text = str(make_spec(step))
    again = build_pass(kind, parse_pipeline(text)[0].options)
    require(again == step, f"pass {step.name!r}: its text {text!r} is read as another pass: {again}")


def _random_states(step: Pass) -> Iterator[State]:
    """Yield states of several sizes, groups, clusters, memory limits and pins."""
    if unknown := [kind.__name__ for kind in step.requires if kind not in _RANDOM_FACTS]:
        raise ValueError(f"random states have no {', '.join(unknown)}: give `states` to check pass {step.name!r}")
    extra_facts: tuple[Collection[type], ...] = ((), (Groups,), (Groups, Clusters))
    for seed, (nodes, facts, tight) in enumerate(product((0, 1, 2, 9, 24, 60), extra_facts, (False, True))):
        yield random_state(
            seed,
            nodes=nodes,
            devices=1 + seed // 2 % 4,
            facts={*step.requires, *facts},
            tight=tight,
            pinned=seed % 5 == 0,
            shuffled=seed % 7 < 3,
        )


def _apply_pass(step: Pass, state: State, where: str) -> State | str:
    """Run a pass; return its state, or the message of a valid error."""
    try:
        return run_pass(step, state)
    except InfeasibleError as error:
        require(Placement in step.provides, f"{where}: it raised {error}, and is not a placer")
        needed = _sum_bytes(state[Profile].graph) if Profile in state else AMPLE_BYTES
        pinned = Groups in state and bool((state[Groups].pinned >= 0).any())
        fits_anywhere = not pinned and all(device.memory_bytes >= needed for device in state.target.devices)
        require(not fits_anywhere, f"{where}: it raised {error}, and every device has room for everything")
        return str(error)
    except Exception as problem:
        raise AssertionError(f"{where}: {type(problem).__name__}: {problem}") from problem


def _describe(value: Any, path: str = "") -> dict[str, object]:
    """Return all contents of a record by path, as comparable copies."""
    children: Mapping[str, Any]
    if isinstance(value, np.ndarray):
        return {path: (str(value.dtype), value.shape, value.tobytes())}
    if is_dataclass(value) and not isinstance(value, type):
        children = {f".{item.name}": getattr(value, item.name) for item in fields(value)}
    elif isinstance(value, Mapping):
        children = {f"[{getattr(key, '__name__', key)}]": item for key, item in value.items()}
    elif isinstance(value, (tuple, list)):
        children = {f"[{index}]": item for index, item in enumerate(value)}
    else:
        is_message = hasattr(value, "SerializeToString")
        return {path: value.SerializeToString(deterministic=True) if is_message else value}
    return {k: v for key, item in children.items() for k, v in _describe(item, path + key).items()}


def _list_differences(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    """Return the first three paths in which two descriptions differ, or nothing."""
    paths = [path for path in {**one, **other} if path not in one or path not in other or one[path] != other[path]]
    return ", ".join(path.lstrip(".") or "the type of the result" for path in paths[:3])
