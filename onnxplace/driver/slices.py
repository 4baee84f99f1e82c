"""Run parts of a pipeline, and alter pipelines such that their bundles record it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onnxplace.pipeline import Observer, PassSpec, Pipeline, Timing, format_pipeline, make_pass, parse_pipeline
from onnxplace.state import State


def run_slice(
    steps: Pipeline, state: State, first: int, end: int, observer: Observer | None
) -> tuple[State, tuple[Timing, ...]]:
    """Run some passes of a pipeline; report their positions in it."""
    count = len(steps.passes)
    report = (lambda name, index, _: observer(name, index + first, count)) if observer else None
    return Pipeline(steps.passes[first:end]).run(state, report)


def insert_pass(steps: Pipeline, position: int, spec: PassSpec) -> Pipeline:
    """Return a pipeline with one more pass; its bundle records that."""
    emit: Any = steps.passes[-1]
    specs = [*parse_pipeline(emit.pipeline)]
    specs.insert(position, spec)
    emit = replace(emit, pipeline=format_pipeline(specs))
    return Pipeline((*steps.passes[:position], make_pass(spec.name, spec.options), *steps.passes[position:-1], emit))


def replace_pass(steps: Pipeline, position: int, spec: PassSpec) -> Pipeline:
    """Return a pipeline with another pass at a position; its bundle records that."""
    emit: Any = steps.passes[-1]
    specs, passes = [*parse_pipeline(emit.pipeline)], [*steps.passes]
    specs[position], passes[position] = spec, make_pass(spec.name, spec.options)
    passes[-1] = replace(emit, pipeline=format_pipeline(specs))
    return Pipeline(tuple(passes))
