"""Compile a model: choose a pipeline, run it, and try its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplace.bundle import Bundle, Staging, prepare_output, stage_output
from onnxplace.driver.choose_pipeline import choose_output, choose_pipeline, redirect_emit
from onnxplace.driver.choose_target import choose_target
from onnxplace.driver.finishing import FinishedBundle, finish_bundle
from onnxplace.driver.keywords import takes_fields_of
from onnxplace.driver.options import CompileSettings
from onnxplace.driver.recomputation import place_or_recompute
from onnxplace.driver.sharding import PlacedModel, place_or_shard, report_spare_ways
from onnxplace.driver.slices import run_slice
from onnxplace.driver.step_strategies import place_for_step, require_training_step, suggest_objective
from onnxplace.driver.throughput import Candidate, place_for_throughput
from onnxplace.errors import Diagnostic, InfeasibleError, ModelError, UsageError
from onnxplace.facts import Placement, Profile, Routes
from onnxplace.machine import list_accelerators, measurement_cache, use_custom_operators
from onnxplace.model import (
    Model,
    bind,
    bind_states,
    load as load_model,
    require_linkable,
    require_operators,
    require_unchanged,
    tensor_size,
)
from onnxplace.pipeline import OBJECTIVES, Pipeline, Timing, report_idle_devices, require_all_devices_used
from onnxplace.state import State
from onnxplace.target import Target
from onnxplace.utils import require_different_files, require_writable

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class Compiled:
    """A bundle with its pipeline, timings and notes."""

    bundle: Bundle
    pipeline: str
    timings: tuple[Timing, ...]
    diagnostics: tuple[Diagnostic, ...]


@takes_fields_of(CompileSettings)
def compile_model(model: str | Path | ModelProto, settings: CompileSettings) -> Compiled:
    """Compile a model as `onnxplace.compile` does; also return timings and notes.

    >>> compiled = compile_model("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
    >>> [timing.name for timing in compiled.timings]  # doctest: +SKIP
    ['optimize', 'profile', 'coplace', 'fuse', 'auto', 'split', 'emit', 'trial']
    """
    return compile_with(model, settings)


def compile_with(model: str | Path | ModelProto, settings: CompileSettings) -> Compiled:
    """Compile a model with a record of settings."""
    _require_model(model)
    settings.check()
    steps = choose_pipeline(settings)
    path = choose_output(model, settings.output, steps)
    target = choose_target(settings.devices, settings.target, settings.max_memory)
    # A file that is no model is reported before an output that another model of this name has.
    source = load_model(model)
    swept = _prepare_paths(model, path, steps, settings.force)
    loaded = bind_states(bind(source, settings.shape or {}, settings.inputs or {}), settings.state)
    with use_custom_operators(settings.custom_op_libraries):
        require_operators(loaded)
    notes = (*_report_unused_gpus(target, settings.devices), *_report_assumed_links(target))
    state = State(target).having(loaded).saying(*notes)
    link_weights = settings.link_weights or getattr(steps.passes[-1], "link_weights", False)
    if link_weights:
        require_linkable(loaded, path)
    with stage_output(path, settings.force) as staging, use_custom_operators(settings.custom_op_libraries):
        steps = redirect_emit(staging.folder, steps, link_weights)
        try:
            placed, timings, candidates = _run_pipeline(steps, state, settings)
        except ModelError:
            require_unchanged(loaded)  # ONNX Runtime may have read weights while another program wrote them
            raise
        finished = _finish(placed, staging, settings, candidates)
        staging.place(finished.bundle.path)
    emit: Any = finished.steps.passes[-1]
    diagnostics = (*swept, *finished.state.diagnostics)
    return Compiled(Bundle(path, finished.bundle.manifest), emit.pipeline, (*timings, *finished.timings), diagnostics)


def _require_model(model: object) -> None:
    """Raise UsageError unless a model is a path or a ModelProto."""
    from onnx import ModelProto

    if not isinstance(model, (str, Path, ModelProto)):
        message = f"expected a path or onnx.ModelProto, got {type(model).__name__}"
        raise UsageError("U049", message, hint="onnx.load reads a file, onnxplace.compile takes its path too")


def _prepare_paths(model: object, output: Path, steps: Pipeline, force: bool) -> list[Diagnostic]:
    """Check that all files can be written.

    Return notes about remains that were removed.
    """
    saved = [Path(file) for step in steps.passes if (file := getattr(step, "save", ""))]
    for file in saved:
        require_different_files(output=output, save_costs=file)
        require_writable(file, *([Path(model)] if isinstance(model, (str, Path)) else []))
    return prepare_output(output, force, *(file.parent for file in saved), measurement_cache.folder())


def _finish(
    placed: PlacedModel, staging: Staging, settings: CompileSettings, candidates: Sequence[Candidate]
) -> FinishedBundle:
    """Run the trial.

    Compare with one device only where the default latency placer was used, and sharding was not asked for.
    """
    count, observer = len(placed.steps.passes), settings.observer
    latency = settings.pipeline is None and not candidates and placed.state[Placement].placer == OBJECTIVES["latency"]
    return finish_bundle(
        placed,
        staging,
        trial=settings.trial,
        cache=settings.cache and all(getattr(step, "cache", True) for step in placed.steps.passes),
        compare_one_device=latency and not settings.strict and settings.shard_ways in (None, 1),
        candidates=candidates,
        compare_steps=settings.chooses_step,
        on_trial=(lambda: observer("trial", count, count + 1)) if observer else (lambda: None),
    )


def _run_pipeline(
    steps: Pipeline, state: State, settings: CompileSettings
) -> tuple[PlacedModel, tuple[Timing, ...], Sequence[Candidate]]:
    """Run the pipeline.

    Check the memory before measuring, and idle devices before emitting. Between measuring and emitting, compare placing
    with sharding, or strategies for throughput, if the user left that open. Also returns what a trial compares.
    """
    steps.require(state.facts)
    observer = settings.observer
    measures = next((index for index, step in enumerate(steps.passes) if Profile in step.provides), 0)

    if settings.objective == "step":
        require_training_step(state[Model])
    state, first = run_slice(steps, state, 0, measures, observer)
    _require_room(state)
    state, second = run_slice(steps, state, measures, measures + 1, observer)
    candidates: Sequence[Candidate] = ()
    if settings.chooses_strategy and len(state.target.devices) > 1:
        may_shard = settings.shard_ways is None and not settings.colocate
        candidates, third = place_for_throughput(steps, state, measures + 1, may_shard=may_shard, observer=observer)
        placed = candidates[0].placed
    elif settings.chooses_step and len(state.target.devices) > 1:
        candidates, third = place_for_step(steps, state, measures + 1, observer)
        placed = candidates[0].placed
    else:
        placed, third = place_or_recompute(
            steps,
            state,
            measures + 1,
            mode=settings.recompute if settings.pipeline is None else "off",
            place=partial(
                place_or_shard,
                compare=settings.chooses_sharding,
                metadata=settings.shard_metadata,
                groups_open=settings.pipeline is None,
                observer=observer,
            ),
            observer=observer,
        )
    unused = report_idle_devices(placed.state)
    if settings.strict:
        require_all_devices_used(unused)
    suggestions = suggest_objective(placed.state) if settings.chooses_sharding else ()
    notes = (*unused, *report_spare_ways(settings.shard_ways, state.target), *suggestions)
    last = len(placed.steps.passes) - 1
    after, fourth = run_slice(placed.steps, placed.state.saying(*notes), last, last + 1, observer)
    placed = replace(placed, state=after)
    return placed, first + second + third + fourth, candidates or _list_rated(placed, settings)


def _list_rated(placed: PlacedModel, settings: CompileSettings) -> list[Candidate]:
    """Return the copies or stages that the user asked for, to be tried with requests in flight; else nothing."""
    if Routes in placed.state and placed.state[Routes].routes:
        return [Candidate("copies", "copies", placed)]
    if settings.pipeline is not None or placed.state[Placement].placer != OBJECTIVES["throughput"]:
        return []
    return [Candidate("stages", "sharded" if placed.whole is not None else "stages", placed)]


def _require_room(state: State) -> None:
    """Raise InfeasibleError if all devices together cannot hold the weights."""
    model, devices = state[Model], state.target.devices
    read = {name for names in model.reads for name in names if name in model.initializers}
    lacking = sum(tensor_size(model.initializers[name]) for name in read) - sum(item.memory_bytes for item in devices)
    if lacking > 0:
        limits = ", ".join(f"{device.id} ({device.memory_bytes} bytes)" for device in devices)
        raise InfeasibleError(
            "P002",
            f"there is room on {limits}; all together lack {lacking} bytes for the weights alone",
            where=model.name,
            hint="add devices, or raise --max-memory (a number without GiB or MiB is in bytes)",
        )


def _report_assumed_links(target: Target) -> list[Diagnostic]:
    """Return a note if a target gives only some of its links.

    The defaults of the others may differ much from the truth.
    """
    missing = [f"{source} -> {destination}" for source, destination in target.list_assumed_links()]
    if not target.links or not missing:
        return []
    hint = "add [[links]] for each direction, or measure them: onnxplace devices --calibrate -o target.toml"
    return [
        Diagnostic(
            "T013",
            "the target does not give this link, so a default is assumed",
            where=", ".join(missing),
            hint=f"{hint} (on each host)" if target.hosts else hint,
        )
    ]


def _report_unused_gpus(target: Target, devices: object) -> list[Diagnostic]:
    """Return a note for each GPU that the default devices omit."""
    if devices is not None or not all(device.is_host for device in target.devices):
        return []
    return [
        Diagnostic(
            "T012",
            f"this GPU ({gpu.name}) is not used: {problem}",
            where=device,
            hint="pip uninstall -y onnxruntime; pip install 'onnxplace[gpu]'",
        )
        for device, gpu, problem in list_accelerators()
    ]
