"""Compile a model: options become a pipeline, the pipeline a bundle, and the bundle is tried out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from onnxplace.bundle import Bundle, prepare_output, stage_output
from onnxplace.driver.finishing import settled
from onnxplace.driver.first_use import compile_loops
from onnxplace.errors import Diagnostic, InfeasibleError, ModelError, UsageError
from onnxplace.facts import Placement, Profile
from onnxplace.feeds import Array
from onnxplace.machine import cuda_problem, list_gpus, local_target, measurement_cache, use_custom_operators
from onnxplace.model import (
    Model,
    StateRequest,
    bind,
    bind_states,
    load as load_model,
    require_beside,
    require_operators,
    require_unchanged,
    tensor_size,
)
from onnxplace.pipeline import (
    BAECHI,
    OBJECTIVES,
    Objective,
    Observer,
    PassSpec,
    Pipeline,
    Timing,
    choose_placer,
    format_pipeline,
    format_tuple,
    report_idle_devices,
    require_all_devices_used,
)
from onnxplace.state import State
from onnxplace.target import Target, parse_memory
from onnxplace.utils import require_place

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class Compiled:
    """A bundle and how it came about."""

    bundle: Bundle
    pipeline: str
    timings: tuple[Timing, ...]
    diagnostics: tuple[Diagnostic, ...]


class CompileOptions(TypedDict, total=False):
    """The keyword arguments of `onnxplace.compile`, which says what they mean."""

    devices: str | Sequence[str] | None
    target: Target | None
    max_memory: str | None
    shape: Mapping[str, int] | None
    inputs: Mapping[str, Array] | None
    state: StateRequest
    costs: str | Path | None
    save_costs: str | Path | None
    cache: bool
    trial: bool
    placer: str | None
    objective: Objective
    budget_seconds: float | None
    pipeline: str | Pipeline | None
    device_map: str | Path | None
    colocate: Sequence[str]
    seed: int
    strict: bool
    force: bool
    link_weights: bool
    custom_op_libraries: Sequence[str | Path]
    observer: Observer | None


def compile_model(
    model: str | Path | ModelProto,
    output: str | Path | None = None,
    *,
    devices: str | Sequence[str] | None = None,
    target: Target | None = None,
    max_memory: str | int | None = None,
    shape: Mapping[str, int] | None = None,
    inputs: Mapping[str, Array] | None = None,
    state: StateRequest = (),
    costs: str | Path | None = None,
    save_costs: str | Path | None = None,
    cache: bool = True,
    trial: bool = True,
    placer: str | None = None,
    objective: Objective = "latency",
    budget_seconds: float | None = None,
    pipeline: str | Pipeline | None = None,
    device_map: str | Path | Mapping[str, str] | None = None,
    colocate: Sequence[str] = (),
    seed: int = 0,
    strict: bool = False,
    force: bool = False,
    link_weights: bool = False,
    custom_op_libraries: Sequence[str | Path] = (),
    observer: Observer | None = None,
) -> Compiled:
    """Compile a model as `onnxplace.compile` does, and return the bundle with how it came about."""
    from onnx import ModelProto

    if not isinstance(model, (str, Path, ModelProto)):
        raise UsageError("U049", f"a {type(model).__name__} is no model", hint="give a path or an onnx.ModelProto")
    if isinstance(device_map, Mapping):
        device_map = json.dumps(dict(device_map))
    if target is not None and devices is not None:
        raise UsageError(
            "U040", "--devices and --target exclude each other", hint="name the devices in the target file"
        )
    _require_types(devices, shape, inputs)
    if pipeline is not None and (placer or objective != "latency" or budget_seconds is not None):
        message = "--pipeline excludes --placer, --objective and --budget"
        raise UsageError("U044", message, hint="name the placer in the pipeline, as in auto{seconds=10}")
    if pipeline is None:
        chosen = choose_placer(placer, objective, budget_seconds, seed or None)
        profile = {"costs": str(costs or ""), "save": str(save_costs or ""), "cache": "" if cache else "false"}
        steps = _default_pipeline(chosen, profile, str(device_map or ""), tuple(colocate), seed)
    else:
        steps = _given_pipeline(pipeline, bool(costs or save_costs or not cache or device_map or colocate or seed))
    _require_one_emit(steps)
    path = _default_output(model, steps) if output is None else _given_output(output)
    saved = [Path(file) for step in steps.passes if (file := getattr(step, "save", ""))]
    for file in saved:
        require_place(file, *([Path(model)] if isinstance(model, (str, Path)) else []))
    swept = prepare_output(path, force, *(file.parent for file in saved), measurement_cache.folder())
    target = target or local_target(devices)
    if max_memory:
        target = target.limiting(parse_memory(str(max_memory), [device.id for device in target.devices]))
    loaded = bind_states(bind(load_model(model), shape or {}, inputs or {}), state)
    with use_custom_operators(custom_op_libraries):
        require_operators(loaded)
    facts = State(target).having(loaded).saying(*_unused_gpus(target, devices), *_assumed_links(target))
    if link_weights or getattr(steps.passes[-1], "link_weights", False):
        require_beside(loaded, path)
        link_weights = True
    with stage_output(path, force) as staging, use_custom_operators(custom_op_libraries):
        steps = _emitting_to(staging.folder, steps, link_weights)
        count = len(steps.passes)
        try:
            facts, timings = _run(steps, facts, strict, observer)
        except ModelError:
            require_unchanged(loaded)  # ONNX Runtime may have met weights that were just being written
            raise
        done = settled(
            steps,
            facts,
            staging,
            trial=trial,
            cache=cache and all(getattr(step, "cache", True) for step in steps.passes),
            rethink=pipeline is None and facts[Placement].placer == OBJECTIVES["latency"] and not strict,
            tell=(lambda: observer("trial", count, count + 1)) if observer else (lambda: None),
        )
        staging.place(done.bundle.path)
    made: Any = done.steps.passes[-1]
    bundle = Bundle(path, done.bundle.manifest)
    return Compiled(bundle, made.pipeline, (*timings, *done.timings), (*swept, *done.state.diagnostics))


def _emitting_to(folder: Path, steps: Pipeline, link_weights: bool) -> Pipeline:
    """Return a pipeline that writes its bundle to a folder, and writes down what it was before."""
    emit = replace(steps.passes[-1], path=str(folder), pipeline=str(steps))  # type: ignore[call-arg]
    if link_weights:
        emit = replace(emit, link_weights=True)  # type: ignore[call-arg]
    return Pipeline((*steps.passes[:-1], emit))


def _require_one_emit(steps: Pipeline) -> None:
    """Raise UsageError unless the pipeline writes one bundle, as the last thing it does."""
    names = [step.name for step in steps.passes]
    if "emit" not in names or names.index("emit") < len(names) - 1:
        message = (
            "the pipeline does something after it wrote its bundle"
            if "emit" in names
            else "the pipeline writes no bundle"
        )
        raise UsageError("U041", message, where=f"pipeline {steps}", hint="end it with split,emit")


def _require_types(devices: object, shape: object, inputs: object) -> None:
    """Raise UsageError for options of Python's that are of another kind than they have to be."""
    if not (devices is None or isinstance(devices, (str, Sequence))):
        hint = 'write "cuda:0,cuda:1", or a list of such names'
        raise UsageError("U054", f"devices cannot be {devices!r}", hint=hint)
    for name, value, hint in (
        ("shape", shape, 'shape={"batch": 8}'),
        ("inputs", inputs, 'inputs={"images": array}; onnxplace.feeds.read_npz reads a file'),
    ):
        if not (value is None or isinstance(value, Mapping)):
            raise UsageError("U054", f"{name} cannot be {value!r}: it is a mapping", hint=f"write {hint}")


def _given_output(output: str | Path) -> Path:
    """Return where the user wants the bundle; raises UsageError for an empty name, which Path takes for a dot."""
    if not isinstance(output, (str, Path)):
        raise UsageError("U032", f"expected a path, got {output!r}", where="output", hint="name a new folder")
    if not str(output):
        raise UsageError("U032", "expected the name of a folder, got ''", where="output", hint="name a new folder")
    return Path(output)


def _default_output(model: object, steps: Pipeline) -> Path:
    """Return where the pipeline says that the bundle goes, else the place of the model, with another ending."""
    emit = steps.passes[-1]
    if (said := getattr(emit, "path", "")) != getattr(type(emit), "path", ""):
        return Path(said)
    if not isinstance(model, (str, Path)) or not Path(model).name:
        return Path("model.bundle")
    return Path(model).with_suffix(".bundle")


def _given_pipeline(given: str | Pipeline, has_options: bool) -> Pipeline:
    """Return the user's pipeline; raises UsageError if options are given that belong into it."""
    if has_options:
        raise UsageError(
            "U042",
            "--pipeline excludes --costs, --save-costs, --no-cache, --device-map, --colocate and --seed",
            hint="write them into it: profile{costs=F,save=F,cache=false,seed=1},coplace{device_map=F,colocate=REGEX}",
        )
    return Pipeline.parse(given) if isinstance(given, str) else given


def _default_pipeline(
    placer: PassSpec, profile: dict[str, str], device_map: str, colocate: tuple[str, ...], seed: int
) -> Pipeline:
    """Return the default pipeline around a placer; options that are empty have their defaults.

    Baechi's placers need nodes joined to their readers first; those that search find out for themselves.
    """
    profile = {key: value for key, value in profile.items() if value}
    if seed:
        profile["seed"] = str(seed)
    join = {} if placer.name in BAECHI else {"join": "never"}
    coplace = join | {
        key: value
        for key, value in (("colocate", format_tuple(colocate) if colocate else ""), ("device_map", device_map))
        if value
    }
    specs = [
        PassSpec("optimize"),
        PassSpec("profile", profile),
        PassSpec("coplace", coplace),
        PassSpec("fuse"),
        placer,
        PassSpec("split"),
        PassSpec("emit"),
    ]
    return Pipeline.parse(format_pipeline(specs))


def _run(steps: Pipeline, state: State, strict: bool, observer: Observer | None) -> tuple[State, tuple[Timing, ...]]:
    """Run the pipeline, pausing before anything is measured, and again once the placement is final."""
    steps.require(state.facts)
    count = len(steps.passes)
    measures = next((index for index, step in enumerate(steps.passes) if Profile in step.provides), 0)

    def part(state: State, begin: int, end: int) -> tuple[State, tuple[Timing, ...]]:
        told = (lambda name, index, _: observer(name, index + begin, count)) if observer else None
        return Pipeline(steps.passes[begin:end]).run(state, told)

    state, first = part(state, 0, measures)
    _require_room(state)
    compile_loops(step.name for step in steps.passes)
    state, second = part(state, measures, count - 1)
    unused = report_idle_devices(state)
    if strict:
        require_all_devices_used(unused)
    state, third = part(state.saying(*unused), count - 1, count)
    return state, first + second + third


def _require_room(state: State) -> None:
    """Raise InfeasibleError if all devices together cannot hold the weights, which nobody needs to measure to know."""
    model, devices = state[Model], state.target.devices
    read = {name for names in model.reads for name in names if name in model.initializers}
    lacking = sum(tensor_size(model.initializers[name]) for name in read) - sum(item.memory_bytes for item in devices)
    if lacking > 0:
        each = ", ".join(f"{device.id} ({device.memory_bytes} bytes)" for device in devices)
        raise InfeasibleError(
            "P002",
            f"there is room on {each}; all together lack {lacking} bytes for the weights alone",
            where=model.name,
            hint="add devices, or raise --max-memory (a number without GiB or MiB is in bytes)",
        )


def _assumed_links(target: Target) -> list[Diagnostic]:
    """Say so when a target gives some links and not others: those may be far from the truth."""
    given = {(link.source, link.destination) for link in target.links}
    pairs = [(a.id, b.id) for a in target.devices for b in target.devices if a is not b]
    missing = [f"{source} -> {destination}" for source, destination in pairs if (source, destination) not in given]
    if not given or not missing:
        return []
    return [
        Diagnostic(
            "T013",
            "the target gives other links and not this one, so a default is assumed",
            where=", ".join(missing),
            hint="add [[links]] for each direction, or measure them: onnxplace devices --calibrate -o target.toml",
        )
    ]


def _unused_gpus(target: Target, devices: object) -> list[Diagnostic]:
    """Say so when there are GPUs here that the default devices leave out."""
    if devices is not None or any(device.kind == "cuda" for device in target.devices):
        return []
    return [
        Diagnostic(
            "T012",
            f"this GPU ({gpu.name}) is not used: {cuda_problem(gpu.index)}",
            where=f"cuda:{gpu.index}",
            hint="pip uninstall -y onnxruntime; pip install 'onnxplace[gpu]'",
        )
        for gpu in list_gpus()
    ]
