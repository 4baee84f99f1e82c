"""Recomputation of a state: order the nodes for memory, choose clones, write the model and its profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import Original, Profile, Recomputation, is_refused
from onnxplace.graph.op_graph import Floats, Ints, number_densely
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.lowering import build_op_graph
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import has_subgraphs
from onnxplace.passes.recomputation.clone_choice import CloneChoice, TurnProblem, choose_clones, held_bytes
from onnxplace.passes.recomputation.cloned_model import clone_profile, find_ranks, write_clones
from onnxplace.passes.recomputation.memory_order import order_for_memory
from onnxplace.problem import device_seconds
from onnxplace.state import State

# After each round, the memory may be short at another place of the schedule.
MAX_ROUNDS = 4
# Limits that are tried where the wanted one cannot be kept, as shares of the way to it.
PARTIAL_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)
_DOMAINS = ("", "ai.onnx", "com.microsoft")
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class _Work:
    """A model that is being rewritten."""

    model: Model
    profile: Profile
    ranks: Mapping[str, int]
    clones: int = 0
    clone_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Return the bytes that one device holds at most, weights included, with the nodes in the model's order."""
        graph = self.profile.graph
        return graph.total_weight_bytes + int(held_bytes(graph, graph.order).max(initial=0))


def recompute_state(state: State, limit_bytes: int) -> State:
    """Return the state with the model, rewritten such that one device could run it within a limit, or near to it.

    A model that keeps the limit stays as it is. Nodes come into an order that frees values early, which is enough for
    some models. Else nodes run a second time (see the pass `recompute`).
    """
    model, profile = state[Model], state[Profile]
    work = _Work(model, profile, find_ranks(model))
    before = work.peak_bytes
    seconds = device_seconds(profile, state.target)
    seconds = seconds.mean(axis=0, where=~is_refused(seconds))
    if before > limit_bytes:
        # A clone may be only one of the nodes of a kernel, so each of them has an equal share of its time.
        shares = np.bincount(profile.unit, seconds)[profile.unit] / np.bincount(profile.unit)[profile.unit]
        work = _reduce_memory(work, shares, limit_bytes)
    if work.clones == 0 and work.peak_bytes >= before:
        unchanged, notes = Recomputation(0, 0.0, before, before), [_report_no_change(before, limit_bytes)]
        return state.with_facts(model, profile, unchanged, Original(model, profile)).with_notes(*notes)
    fact = Recomputation(work.clones, work.clone_seconds, before, work.peak_bytes)
    notes = _report(fact, float(seconds.sum()), limit_bytes)
    return state.with_facts(work.model, work.profile, fact, Original(model, profile)).with_notes(*notes)


def _reduce_memory(work: _Work, seconds: Floats, limit_bytes: int) -> _Work:
    """Return the model with less memory, as far as the limit demands and as rounds of clones achieve it."""
    for _ in range(MAX_ROUNDS):
        work = _reorder(work)
        if work.peak_bytes <= limit_bytes:
            break
        problem, choice = _choose(work, seconds, limit_bytes)
        if not choice.is_cloned.any():
            break
        cloned = write_clones(work.model, problem, choice.is_cloned, work.ranks)
        after = _reorder(
            _Work(
                model=cloned.model,
                profile=clone_profile(work.profile, cloned),
                ranks=cloned.ranks,
                clones=work.clones + int(cloned.is_clone.sum()),
                clone_seconds=work.clone_seconds + choice.seconds,
            )
        )
        if after.peak_bytes >= work.peak_bytes:
            break
        seconds = np.where(cloned.source >= 0, seconds[cloned.source], 0.0)
        work = after
    return work


def _choose(work: _Work, seconds: Floats, limit_bytes: int) -> tuple[TurnProblem, CloneChoice]:
    """Return the schedule with its turn where it holds most, and the clones that lower its memory."""
    graph, peak = work.profile.graph, work.peak_bytes
    order = graph.order
    problem = TurnProblem(graph, order, int(held_bytes(graph, order).argmax()))
    may_clone, best = np.array([_is_pure(node) for node in work.model.nodes], dtype=np.bool_), None
    for share in PARTIAL_SHARES:
        target = peak - int(share * (peak - limit_bytes)) - graph.total_weight_bytes
        choice = choose_clones(problem, seconds, may_clone, target)
        if best is None or choice.peak_bytes < best.peak_bytes:
            best = choice
        if best.peak_bytes <= target:
            break
    assert best is not None
    return problem, best


def _reorder(work: _Work) -> _Work:
    """Return the model with its nodes in an order that needs less memory, if there is one."""
    graph = work.profile.graph
    order = order_for_memory(graph, graph.order)
    if (order == np.arange(len(graph))).all() and work.model.keeps_order:
        return work
    if held_bytes(graph, order).max(initial=0) >= held_bytes(graph, graph.order).max(initial=0):
        order = graph.order
    return _permute(work, order)


def _permute(work: _Work, order: Ints) -> _Work:
    """Return the model with its nodes in another order."""
    nodes = [work.model.nodes[index] for index in order.tolist()]
    model = replace(work.model.replacing(nodes, work.model.initializers), keeps_order=True)
    profile, old = work.profile, work.profile.graph
    sizes = dict(zip(old.value_names, old.value_bytes.tolist()))
    graph = replace(build_op_graph(model, sizes), workspace_bytes=old.workspace_bytes[order])
    permuted = replace(
        profile,
        graph=graph,
        seconds=MappingProxyType({name: times[order] for name, times in profile.seconds.items()}),
        sources=MappingProxyType({name: sources[order] for name, sources in profile.sources.items()}),
        unit=number_densely(profile.unit[order].tolist()),
        user_groups=None if profile.user_groups is None else profile.user_groups[order],
        backward=None if profile.backward is None else profile.backward[order],
        training=None if profile.training is None else profile.training.spread(order),
        repeats=(),
        spread=MappingProxyType({name: spread[order] for name, spread in profile.spread.items()}),
        errors=MappingProxyType({name: errors[order] for name, errors in profile.errors.items()}),
        prints=tuple(profile.prints[index] for index in order.tolist()) if profile.prints else (),
    )
    return replace(work, model=model, profile=permuted)


def _is_pure(node: NodeProto) -> bool:
    if node.domain not in _DOMAINS or node.op_type in RANDOM_OPERATORS or has_subgraphs(node):
        return False
    # Dropout draws in training mode, which an input says. Sequences and optionals have no size that is known.
    draws = node.op_type == "Dropout" and len(node.input) > 2
    return not draws and not node.op_type.startswith(("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence"))


def _report(fact: Recomputation, step_seconds: float, limit_bytes: int) -> list[Diagnostic]:
    saved = (fact.peak_before_bytes - fact.peak_after_bytes) / _MEBIBYTE
    peak = f"{saved:.1f} MiB less on one device ({fact.peak_after_bytes / _MEBIBYTE:.1f} MiB at most)"
    message = f"nodes are ordered for memory: {peak}"
    if fact.nodes:
        share = fact.seconds / step_seconds if step_seconds else 0.0
        extra = f"{1e3 * fact.seconds:.3g} ms per step ({share:.0%})"
        message = f"{format_count(fact.nodes, 'node')} run a second time, which takes {extra}: {peak}"
    notes = [Diagnostic("L070", message, where="recompute")]
    if fact.peak_after_bytes > limit_bytes:
        notes.append(_report_missed_limit(fact.peak_after_bytes, limit_bytes))
    return notes


def _report_no_change(peak_bytes: int, limit_bytes: int) -> Diagnostic:
    if peak_bytes > limit_bytes:
        return _report_missed_limit(peak_bytes, limit_bytes)
    message = f"one device needs {peak_bytes} bytes of {limit_bytes}: nothing is recomputed"
    return Diagnostic("L072", message, where="recompute")


def _report_missed_limit(peak_bytes: int, limit_bytes: int) -> Diagnostic:
    need = f"the step needs {peak_bytes} bytes on one device, more than the {limit_bytes} wanted"
    text, hint = f"{need}, and recomputing lowers that no further", "smaller batches need less, or several devices"
    return Diagnostic("L071", text, where="recompute", hint=hint)
