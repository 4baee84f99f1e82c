"""Compile a model: choose a pipeline, run it, and try its bundle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.staging import Staging, prepare_output, stage_output
from onnxplace.driver.candidates import Candidate, Profiled, create_pass
from onnxplace.driver.choose import (
    GIVEN_PASSES,
    Comparison,
    Objective,
    decide_or_recompute,
    find_objective,
    make_latency_objective,
    make_throughput_objective,
)
from onnxplace.driver.settings import CompileSettings, choose_output, choose_pipeline, choose_streaming, choose_target
from onnxplace.driver.sources import ModelSource, SizedModel, bind_source, open_source, require_one_size
from onnxplace.driver.step_parts import suggest_fixed_sizes
from onnxplace.driver.trials import Compiled, are_measured, finish_bundle
from onnxplace.errors import Diagnostic, InfeasibleError, ModelError, UsageError
from onnxplace.facts import Placement, Profile, Routes, Streaming
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import list_accelerators, require_device
from onnxplace.machine.ort_sessions import use_custom_operators
from onnxplace.measure.size_comparison import start_early, takes_long
from onnxplace.measure.trial import measure_error
from onnxplace.model.loading import load as load_model, require_linkable, require_unchanged
from onnxplace.model.model import Model
from onnxplace.model.operator_checks import require_operators
from onnxplace.model.tensors import tensor_size
from onnxplace.passes.profiling.streamed_nodes import MIN_STREAMED_BYTES
from onnxplace.pipeline.pipeline import Observer, Pipeline
from onnxplace.pipeline.select_placer import OBJECTIVES, report_idle_devices, require_all_devices_used
from onnxplace.state import State
from onnxplace.target.target import Target
from onnxplace.utils.files import disk_error, format_path, require_different_files, require_writable
from onnxplace.utils.keywords import takes_fields_of

if TYPE_CHECKING:
    from onnx import ModelProto

# Placements that are tried until one is within `--max-error`, and the least part of its share that the next one gets.
MAX_ERROR_ROUNDS, MIN_SHARE_RATIO = 5, 1e-3


@takes_fields_of(CompileSettings)
def compile_model(model: str | Path | ModelProto | Any, settings: CompileSettings) -> Compiled:
    """Compile a model as `onnxplace.compile` does; also return timings and notes.

    >>> compiled = compile_model("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
    >>> [timing.name for timing in compiled.timings]  # doctest: +SKIP
    ['optimize', 'profile', 'coplace', 'fuse', 'auto', 'split', 'emit', 'trial']
    """
    return compile_with(model, settings)


def compile_with(model: str | Path | ModelProto | Any, settings: CompileSettings) -> Compiled:
    """Compile a model with a record of settings."""
    settings.check()
    steps = choose_pipeline(settings)
    given = settings.devices, settings.target, settings.max_memory, settings.machine, settings.providers
    has_max_error = settings.max_error is not None and settings.is_placement_open
    target = choose_target(*given, has_max_error=has_max_error)
    for device in target.devices if settings.max_error else ():  # all of them run
        require_device(device)
    with open_source(model, settings.example_inputs) as source:
        return _compile_source(source, steps, target, settings)


def _compile_source(source: ModelSource, steps: Pipeline, target: Target, settings: CompileSettings) -> Compiled:
    """Compile a model that can be loaded."""
    path = choose_output(source.origin, settings.output, steps)
    # A file that is no model, and wrong sizes, are reported before an output that another model of this name has.
    model = load_model(source.path)
    sized, assumed = bind_source(
        source, model, shape=settings.shape, inputs=settings.inputs, state=settings.state, llm=settings.llm
    )
    loaded = sized[0].model
    begin_step = settings.observer or (lambda *_: None)
    begin_step("checking operators and paths", 0, 1)
    require_one_size(sized, target.hosts, "several hosts run one plan")
    if settings.objective == "worst-ratio" and len(sized) == 1:
        raise UsageError("U042", "worst-ratio compares several sizes", where="--objective", hint="repeat --shape")
    for step in steps.passes:
        require_one_size(sized, getattr(step, "costs", ""), "--costs has those of one")
        require_one_size(sized, getattr(step, "save", ""), "--save-costs writes those of one")
    swept = _prepare_paths(source.origin, path, steps, settings.force)
    with use_custom_operators(settings.custom_op_libraries):
        require_operators(loaded)
    notes = (*assumed, *_report_unused_gpus(target, settings.devices), *_report_assumed_links(target))
    states = [State(target).with_facts(item.model).with_notes(*notes) for item in sized]
    if settings.link_weights or getattr(steps.passes[-1], "link_weights", False):
        require_linkable(loaded, path)
    with stage_output(path, settings.force) as staging, use_custom_operators(settings.custom_op_libraries):
        try:
            compiled = _compile_sizes(sized, states, steps, staging, settings)
        except ModelError:
            require_unchanged(loaded)  # ONNX Runtime may have read weights while another program wrote them
            raise
        begin_step("putting the bundle in place", 0, 1)
        staging.place(compiled.bundle.path)
    bundle = Bundle(path, compiled.bundle.manifest)
    return replace(compiled, bundle=bundle, diagnostics=(*swept, *compiled.diagnostics))


def _compile_sizes(
    sized: Sequence[SizedModel], states: Sequence[State], steps: Pipeline, staging: Staging, settings: CompileSettings
) -> Compiled:
    """Write the bundle that the user wants, for one size or for several."""
    if len(sized) == 1:
        return _run_pipeline(steps, states[0], staging, settings)
    from onnxplace.driver.plan_sets import join_sizes

    compiled, is_worst_ratio = [], settings.objective == "worst-ratio"
    each = replace(settings, objective="latency") if is_worst_ratio else settings
    for number, state in enumerate(states):
        part = replace(each, observer=_name_size(settings.observer, number, len(sized)))
        with sized[number].name_in_errors():
            compiled.append(_run_pipeline(steps, state, staging.for_part(number), part))
    is_rate = settings.objective == "throughput" and not sized[0].model.states
    options = {"measures": settings.trial, "is_worst_ratio": is_worst_ratio, "is_rate": is_rate}
    try:
        return join_sizes(compiled, sized, settings.plans, **options)
    except OSError as problem:
        raise disk_error(problem, format_path(staging.path)) from None


def _name_size(observer: Observer | None, number: int, count: int) -> Observer | None:
    """Return an observer of the passes for one of several sizes."""
    return observer and (lambda name, *place: observer(f"size {number + 1} of {count}: {name}", *place))


def _prepare_paths(model: object, output: Path, steps: Pipeline, force: bool) -> list[Diagnostic]:
    """Check that all files can be written.

    Return notes about remains that were removed.
    """
    saved = [Path(file) for step in steps.passes if (file := getattr(step, "save", ""))]
    for file in saved:
        require_different_files(output=output, save_costs=file)
        require_writable(file, *([Path(model)] if isinstance(model, (str, Path)) else []))
    return prepare_output(output, force, *(file.parent for file in saved), measurement_cache.folder())


def _run_pipeline(steps: Pipeline, state: State, staging: Staging, settings: CompileSettings) -> Compiled:
    """Write the bundle that the user wants.

    What can be checked before measuring is checked first, and the memory before placing.
    """
    steps.require(state.facts)
    *passes, emit = steps.passes
    profiled = Profiled((), state, tuple(passes), emit, links_weights=settings.link_weights)
    if settings.objective == "step":
        find_objective("step", profiled)  # refuses models that are no training steps
    profiled = _profile(profiled, settings)
    if settings.max_error is None:
        return _build(profiled, staging, settings)
    return _build_within(settings.max_error, profiled, staging, settings)


def _build_within(maximum: float, profiled: Profiled, staging: Staging, settings: CompileSettings) -> Compiled:
    """Write a bundle whose outputs are off by at most `maximum`.

    The bundle as it would be without a maximum comes first. Where it exceeds the maximum, the errors of nodes say which
    ones may be on which device, though not how the model amplifies them. So they get less of the maximum from round to
    round. Raises InfeasibleError after `MAX_ERROR_ROUNDS`.
    """
    feeds, share, reached = profiled.state[Model].feeds(profiled.seed), math.inf, list[float]()
    for _ in range(MAX_ERROR_ROUNDS):
        limited = profiled
        if share <= maximum:
            limit = create_pass("limit-errors", maximum=share, seed=profiled.seed)
            limited = profiled.insert(limit, settings.observer)
        compiled = _build(limited, staging, settings)
        reached.append(measure_error(compiled.bundle, feeds))
        if reached[-1] <= maximum:
            return compiled
        share = min(share * min(max(maximum / reached[-1], MIN_SHARE_RATIO), 0.5), maximum)
        errors = limited.state[Profile].errors  # they are not measured again
        profiled = replace(profiled, state=profiled.state.with_facts(replace(profiled.state[Profile], errors=errors)))
        staging.clear()
    message = f"the bundle's error is {min(reached):.2g} at least, allowed are {maximum:g}"
    hint = "allow more with --max-error, or leave out the devices that are less precise than cpu:0"
    raise InfeasibleError("P065", message, where=profiled.state[Model].name, hint=hint)


def _build(profiled: Profiled, staging: Staging, settings: CompileSettings) -> Compiled:
    """Write the best bundle of a profiled model, and try it; idle devices are checked before."""
    objective = _choose_objective(settings, profiled)
    mode = "off" if settings.pipeline is not None or objective.is_exploring else settings.recompute
    with ExitStack() as stack:
        if settings.trial and _may_compare_sizes(profiled.state):
            start_early(stack)  # beside the search, which has one thread
        kept, *others = decide_or_recompute(objective, profiled, mode, settings.observer)
        unused = report_idle_devices(kept.state)
        if settings.strict:
            require_all_devices_used(unused)
        spare = _report_spare_ways(settings.shard_ways, profiled.state.target)
        kept = kept.with_notes(*unused, *spare)
        if settings.compares_sharding:
            kept = kept.with_notes(*_suggest_objective(kept.state), *suggest_fixed_sizes(kept))
        kept = kept.write(staging.folder, settings.observer)
        return finish_bundle((kept, *others), _choose_comparison(settings, objective, kept), staging, settings)


def _may_compare_sizes(state: State) -> bool:
    """Return whether a trial is likely to compare a bundle with the unsplit model at another size, in a child."""
    profile, seconds = state[Profile], min(state[Profile].whole_seconds.values(), default=math.inf)
    is_tried = bool(state[Model].dimensions) and are_measured(profile, profile.seconds)
    return is_tried and not takes_long(int(profile.graph.weight_bytes.sum()), seconds)


def _profile(profiled: Profiled, settings: CompileSettings) -> Profiled:
    """Return the model with its costs, after the passes up to the first one that provides them."""
    passes, target = profiled.rest, profiled.state.target
    measuring = next((index for index, step in enumerate(passes) if Profile in step.provides), 0)
    for _ in range(measuring):
        profiled = profiled.advance(settings.observer)
    may_stream = bool(choose_streaming(settings, target)) or any(Streaming in step.provides for step in passes)
    _require_memory(profiled.state, MIN_STREAMED_BYTES if may_stream else None)
    return profiled.advance(settings.observer)


def _choose_objective(settings: CompileSettings, profiled: Profiled) -> Objective:
    """Return what is compared: strategies, where the user left open how to use several devices, else few."""
    has_choice = settings.is_placement_open and len(profiled.state.target.devices) > 1
    shares_processors = profiled.state.target.shares_processors
    if settings.objective == "throughput" and has_choice and settings.shard_ways in (None, 1):
        return make_throughput_objective(may_shard=settings.is_sharding_open)
    is_step = settings.objective == "step" and has_choice and settings.is_sharding_open
    if is_step and (step := find_objective("step", profiled)):
        return step
    return make_latency_objective(
        whole=(find_objective("latency", profiled) if settings.pipeline is None else None) or GIVEN_PASSES,
        may_shard=settings.compares_sharding,
        shard_metadata=settings.shard_metadata,
        stream=choose_streaming(settings, profiled.state.target),
        stream_mode=settings.stream,
        compares_sets=settings.is_placement_open and settings.objective == "latency" and shares_processors,
    )


def _choose_comparison(settings: CompileSettings, objective: Objective, kept: Candidate) -> Comparison:
    """Return what a trial compares with the bundle.

    That is one device only where the default placer for latency was used, and sharding was not asked for. Copies or
    stages that the user asked for run with requests in flight.
    """
    placer = kept.state[Placement].placer
    if objective.is_exploring or objective.comparison == "steps":
        return objective.comparison
    if Routes in kept.state and kept.state[Routes].routes:
        return "requests in flight"
    if settings.pipeline is not None:
        return "none"
    if placer == OBJECTIVES["throughput"]:
        return "requests in flight"
    is_whole_latency = placer == OBJECTIVES["latency"] and settings.shard_ways in (None, 1)
    return "one device" if is_whole_latency and not settings.strict else "none"


def _suggest_objective(state: State) -> list[Diagnostic]:
    """Return a note if a training step was compiled without comparing micro-batches."""
    if state[Profile].training is None or len(state.target.devices) == 1:
        return []
    message = "this is a training step: micro-batches in stages, and batches split over devices, were not considered"
    return [Diagnostic("L075", message, hint="--objective step compares them, for a fixed size of the batch")]


def _report_spare_ways(ways: int | None, target: Target) -> list[Diagnostic]:
    """Return a note if the user asked for more ways than there are devices."""
    count = len(target.devices)
    if ways is None or ways <= count:
        return []
    message = f"operators can be split over {count} devices at most, {ways} were asked for"
    return [Diagnostic("U075", message, where="--shard", hint="name more devices with --devices")]


def _require_memory(state: State, least_streamed: int | None) -> None:
    """Raise InfeasibleError if all devices together cannot hold the weights; larger ones than a size may stream."""
    model = state[Model]
    read = {name for names in model.reads for name in names if name in model.initializers}
    sizes = [tensor_size(model.initializers[name]) for name in read]
    held = sum(size for size in sizes if least_streamed is None or size < least_streamed)
    lacking = held - state.target.total_bytes
    if lacking > 0:
        message = f"the weights need {lacking} bytes more than all devices have together"
        hint = "add devices, or raise --max-memory (a number without GiB or MiB is in bytes)"
        raise InfeasibleError("P002", f"{message}: {state.target.describe_memory()}", where=model.name, hint=hint)


def _report_assumed_links(target: Target) -> list[Diagnostic]:
    """Return a note if a target gives only some of its links.

    The defaults of the others may differ much from the truth.
    """
    missing = [f"{source} -> {destination}" for source, destination in target.list_assumed_links()]
    if not target.links or not missing:
        return []
    hint = "add [[links]] for each direction, or measure them: onnxplace devices --calibrate -o target.toml"
    hint += " (on each host)" if target.hosts else ""
    message = "the target does not give this link, so a default is assumed"
    return [Diagnostic("T013", message, where=", ".join(missing), hint=hint)]


def _report_unused_gpus(target: Target, devices: object) -> list[Diagnostic]:
    """Return a note for each GPU that the default devices omit."""
    if devices is not None or not all(device.is_host for device in target.devices):
        return []
    hint = "pip uninstall -y onnxruntime; pip install 'onnxplace[gpu]'"
    return [
        Diagnostic("T011", f"this GPU ({gpu.name}) is not used: {problem}", where=device, hint=hint)
        for device, gpu, problem in list_accelerators()
    ]
