"""The options of `onnxplace.compile`, and what follows from them: the passes, the devices, the folder of the bundle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from onnxplace.errors import UsageError, format_value
from onnxplace.feeds.feeds import Array
from onnxplace.machine.hardware import available_memory_bytes, local_target
from onnxplace.model.state_binding import StateRequest
from onnxplace.pipeline.pipeline import Observer, Pipeline, make_pass
from onnxplace.pipeline.select_placer import BAECHI, OBJECTIVES, ObjectiveName, choose_placer
from onnxplace.state import Pass
from onnxplace.target.parsing import parse_bytes, parse_memory
from onnxplace.target.target import Target
from onnxplace.target.target_file import read_target

Effort = Literal["low", "default", "high"]
# What an effort sets of passes, unless the user sets it.
EFFORTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "low": {"profile": {"estimate": True}, "auto": {"seconds": 0.2}, "stages": {"seconds": 0.2}},
    "default": {"auto": {"eager": True}},
    "high": {"profile": {"thorough": True, "seconds": 5.0}},
}
# How `--max-memory` names the host's memory.
HOST = "host"
# No target has as many devices as more digits say.
_WAYS = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class CompileSettings:
    """The arguments of `onnxplace.compile`, which documents them, behind the model."""

    output: str | Path | None = None
    _: KW_ONLY
    devices: str | Sequence[str] | None = None
    target: Target | str | Path | None = None
    machine: str | None = None
    providers: str | Sequence[str] = ()
    max_memory: str | int | None = None
    shape: Mapping[str, int | Sequence[int]] | Sequence[object] | None = None
    plans: int = 3
    inputs: Mapping[str, Array] | None = None
    state: StateRequest = ()
    llm: bool = False
    fixed_sizes: bool = False
    example_inputs: Sequence[object] | Mapping[str, object] | None = None
    costs: str | Path | None = None
    save_costs: str | Path | None = None
    cache: bool = True
    trial: bool = True
    placer: str | None = None
    objective: ObjectiveName = "latency"
    budget_seconds: float | None = None
    effort: Effort = "default"
    pipeline: str | Pipeline | None = None
    device_map: str | Path | Mapping[str, str | int] | None = None
    colocate: Sequence[str] = ()
    shard: str | int = "auto"
    shard_map: str | Path | Mapping[str, str] | None = None
    shard_metadata: bool = False
    recompute: str = "auto"
    stream: str = "auto"
    pool: str | int | None = None
    max_error: float | None = None
    seed: int = 0
    strict: bool = False
    force: bool = False
    link_weights: bool = False
    custom_op_libraries: Sequence[str | Path] = ()
    observer: Observer | None = None

    @property
    def device_map_text(self) -> str:
        """Return the device map as text: a path, JSON, or nothing."""
        return _format_map(self.device_map)

    @property
    def shard_map_text(self) -> str:
        """Return the shard map as text: a path, JSON, or nothing."""
        return _format_map(self.shard_map)

    @property
    def shard_ways(self) -> int | None:
        """Return the most devices that may share an operator: 1 for none, 0 for all, None to choose.

        Raises UsageError for other words and numbers.
        """
        text = str(self.shard)
        if text == "auto":
            return 0 if self.shard_map_text else None
        if text == "off":
            return 1
        if _WAYS.fullmatch(text) and int(text) > 0:
            return int(text)
        hint = "--shard 2 splits operators over two devices; auto splits them where that is faster"
        message = f"expected auto, off or a number of devices, got {format_value(text)}"
        raise UsageError("U005", message, where="--shard", hint=hint)

    @property
    def is_placement_open(self) -> bool:
        """Return whether the user left open which device gets which node."""
        return self.pipeline is None and self.has_default_placer and not self.device_map_text

    @property
    def has_default_placer(self) -> bool:
        """Return whether the placer is the default one, whether typed or not."""
        return self.placer in (None, OBJECTIVES["latency"])

    @property
    def is_sharding_open(self) -> bool:
        """Return whether the user left open whether operators are split, too."""
        return self.is_placement_open and not self.colocate and self.shard_ways is None

    @property
    def compares_sharding(self) -> bool:
        """Return whether placing whole operators and splitting them are compared."""
        return self.is_sharding_open and self.objective in ("latency", "fit")

    @property
    def may_stream(self) -> bool:
        """Return whether weights may stream: one request at a time, over whole operators, placed by no one else."""
        is_open = self.pipeline is None and self.has_default_placer and self.shard_ways in (None, 1)
        return is_open and self.objective not in ("throughput", "step") and self.stream != "off"

    @property
    def sets_pass_options(self) -> bool:
        """Return whether options are given that a pipeline would hold itself."""
        files = self.costs or self.save_costs or self.device_map_text
        return bool(files or not self.cache or self.colocate or self.seed or self.effort != "default")

    def check(self) -> None:
        """Raise UsageError for wrong words and sizes, and for options that exclude each other."""
        require_one_target(self.devices, self.target, self.machine, self.providers)
        require_effort(self.effort)
        self._check_amounts()
        has_pipeline, ways = self.pipeline is not None, self.shard_ways
        shards = ways not in (None, 1)
        placers = self.placer or self.objective != "latency" or self.budget_seconds is not None
        given = {"--stream always": self.stream == "always", "--pool": self.pool is not None}
        streams = " and ".join(name for name, is_given in given.items() if is_given)

        def exclude(are_given: object, message: str, hint: str, where: str = "") -> None:
            if are_given:
                raise UsageError("U042", message, where=where, hint=hint)

        hint = "name the placer in the pipeline, as in auto{seconds=10}"
        exclude(has_pipeline and placers, "--pipeline excludes --placer, --objective and --budget", hint)
        message = "--shard-map says how to split operators, and --shard off not to"
        exclude(ways == 1 and self.shard_map_text, message, "omit one of the two", "--shard-map")
        hint = "name the pass after profile: optimize,profile,shard{ways=2},coplace,..."
        exclude(has_pipeline and shards, "--pipeline excludes --shard and --shard-map", hint)
        message = "--shard and --shard-map exclude --device-map and --colocate: parts of operators have their devices"
        exclude(shards and (self.device_map_text or self.colocate), message, "omit one of the two")
        hint = "name the pass after profile: optimize,profile,recompute{limit=4GiB},coplace,..."
        recomputes = self.recompute not in ("auto", "off")
        exclude(has_pipeline and recomputes, "--pipeline excludes --recompute", hint, "--recompute")
        message = f"{streams} excludes --stream off, --pipeline, --placer, --shard and --objective throughput, step"
        hint = "in a pipeline, name the placer: optimize,profile,coplace,fuse,stream{pool=2GiB},split,emit"
        exclude(streams and not self.may_stream, message, hint, "--stream")
        message = "--pipeline excludes --costs, --save-costs, --no-cache, --device-map, --colocate, --seed and --effort"
        hint = "write them into it: profile{costs=F,save=F,cache=false,seed=1},coplace{device_map=F,colocate=REGEX}"
        exclude(has_pipeline and self.sets_pass_options, message, hint)

    def _check_amounts(self) -> None:
        if self.plans < 1:
            hint = "1 compiles one plan for all sizes of --shape"
            raise UsageError("U005", f"expected 1 plan or more, got {self.plans}", where="--plans", hint=hint)
        if self.max_error is not None and not 0 < self.max_error < math.inf:
            hint = "1e-3 allows a thousandth of the largest value of each output"
            message = f"expected a number above 0, got {self.max_error:g}"
            raise UsageError("U005", message, where="--max-error", hint=hint)
        if self.stream not in ("auto", "off", "always"):
            hint = "auto: weights stream where no device holds them all; always: all that can, through a --pool"
            message = f"expected auto, off or always, got {format_value(self.stream)}"
            raise UsageError("U005", message, where="--stream", hint=hint)
        if self.pool is not None:
            parse_pool(self.pool)
        try:
            if self.recompute not in ("auto", "off", "always"):
                parse_bytes(self.recompute)
        except (UsageError, TypeError):
            hint = "auto: where nothing fits otherwise; always; or the memory that one device would have, such as 4GiB"
            message = f"expected auto, off, always or a size, got {format_value(self.recompute)}"
            raise UsageError("U005", message, where="--recompute", hint=hint) from None


def require_effort(effort: str) -> None:
    """Raise UsageError unless an effort is one of `EFFORTS`."""
    if effort not in EFFORTS:
        message = f"expected low, default or high, got {format_value(effort)}"
        raise UsageError("U005", message, where="--effort", hint="low: estimates and little search; high: all of it")


def _format_map(value: str | Path | Mapping[str, Any] | None) -> str:
    return json.dumps(dict(value)) if isinstance(value, Mapping) else str(value or "")


def choose_pipeline(settings: CompileSettings) -> Pipeline:
    """Return the user's pipeline, or the default one around a placer.

    Raises UsageError unless it writes exactly one bundle, at its end.
    """
    given = settings.pipeline
    if given is None:
        return _build_default(settings)
    steps = given if isinstance(given, Pipeline) else Pipeline.parse(given)
    names = [step.name for step in steps.passes]
    if "emit" in names and names.index("emit") == len(names) - 1:
        return steps
    message = "the pipeline continues after it wrote its bundle" if "emit" in names else "the pipeline writes no bundle"
    raise UsageError("U002", message, where=f"pipeline {steps}", hint="end it with split,emit")


def _build_default(settings: CompileSettings) -> Pipeline:
    """Return the default pipeline around a placer.

    Baechi's placers need nodes joined to their readers first; placers that search decide on that themselves.
    """

    def make(name: str, **options: object) -> Pass:
        return make_pass(name, {**EFFORTS[settings.effort].get(name, {}), **options})

    placer = choose_placer(settings.placer, settings.objective, settings.budget_seconds, settings.seed or None)
    shard = []
    if settings.shard_ways not in (None, 1):
        stages, weights = int(settings.objective != "throughput"), "least" if settings.objective == "fit" else "fit"
        options = {"ways": settings.shard_ways, "stages": stages, "weights": weights}
        shard = [make("shard", **options, metadata=settings.shard_metadata, map=settings.shard_map_text)]
    files = {"costs": str(settings.costs or ""), "save": str(settings.save_costs or "")}
    join, colocate = "worth" if placer.name in BAECHI else "never", tuple(settings.colocate)
    return Pipeline(
        (
            make("optimize", fixed_sizes=settings.fixed_sizes),
            make("profile", **files, cache=settings.cache, seed=int(settings.seed)),
            *shard,
            make("coplace", join=join, colocate=colocate, device_map=settings.device_map_text),
            make("fuse"),
            make(placer.name, **placer.options),
            make("split"),
            make("emit"),
        )
    )


def choose_output(model: object, output: str | Path | None, steps: Pipeline) -> Path:
    """Return the folder of the bundle.

    That is `output`, else the path in the pipeline, else the path of the model with the ending `.bundle`. Raises
    UsageError for an empty name, which Path reads as the working folder.
    """
    if isinstance(output, (str, Path)) and str(output):
        return Path(output)
    if output is not None:
        expected = "the name of a folder" if output == "" else "a path"
        raise UsageError("U032", f"expected {expected}, got {output!r}", where="output", hint="name a new folder")
    emit = steps.passes[-1]
    if (path := getattr(emit, "path", "")) != getattr(type(emit), "path", ""):
        return Path(path)
    if not isinstance(model, (str, Path)) or not Path(model).name:
        return Path("model.bundle")
    return Path(model).with_suffix(".bundle")


def require_one_target(devices: object, target: object, machine: object = None, providers: object = ()) -> None:
    """Raise UsageError if devices are named in two ways, or providers are for devices that are not here."""
    given = {"--devices": devices, "--target": target, "--machine": machine}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        hint = "name the devices in the target file" if machine is None else "`plan --save-target F` writes its target"
        raise UsageError("U042", f"{' and '.join(names)} exclude each other", hint=hint)
    if providers and (target is not None or machine is not None):
        message = f"--providers is for devices of this machine, and excludes {names[0]}"
        raise UsageError("U042", message, hint="name further devices, with their processors, in the target file")


def choose_target(
    devices: str | Sequence[str] | None,
    target: Target | str | Path | None,
    max_memory: str | int | None,
    machine: str | None = None,
    providers: str | Sequence[str] = (),
    *,
    has_max_error: bool = False,
) -> Target:
    """Return the target, that of a file or of a machine's name, or devices of this machine, with memory limits.

    Raises UsageError if devices are given in two ways.
    """
    require_one_target(devices, target, machine, providers)
    names = [name.strip() for name in providers.split(",")] if isinstance(providers, str) else list(providers)
    if machine is not None:
        from onnxplace.target.machines import parse_machine

        target = parse_machine(machine).to_target()
    elif isinstance(target, (str, Path)):
        target = read_target(target)
    target = target or local_target(devices, list(filter(None, names)), has_max_error=has_max_error)
    if not max_memory:
        return target
    limits = _parse_limits(max_memory, target)
    return target.limiting({name: size for name, size in limits.items() if name != HOST})


def _parse_limits(max_memory: str | int, target: Target) -> dict[str, int]:
    """Return the limits of devices and, where all are on one host, of the host's memory for weights that stream."""
    return parse_memory(str(max_memory), [*(device.id for device in target.devices), *([] if target.hosts else [HOST])])


def parse_pool(pool: str | int) -> int:
    """Return the bytes of a pool; raises UsageError."""
    try:
        size = parse_bytes(str(pool))
    except UsageError as problem:
        raise UsageError("U005", problem.message, where="--pool", hint=problem.hint) from None
    if not size:
        raise UsageError("U005", "a pool needs memory, got 0 bytes", where="--pool", hint="write it as 2GiB")
    return size


def choose_streaming(settings: CompileSettings, target: Target) -> Pass | None:
    """Return the placer that lets weights stream; None where they do not.

    The host keeps them in as much memory as the user allows, by default as much as is free on this machine.
    """
    if not settings.may_stream or target.hosts:
        return None
    limits = settings.max_memory if "=" in str(settings.max_memory or "") else None
    host = _parse_limits(limits, target).get(HOST) if limits else None
    is_here = settings.target is None and settings.machine is None
    if host is None and is_here and not all(device.is_host for device in target.devices):
        host = available_memory_bytes()
    sizes = {"pool": str(settings.pool or ""), "host": "" if host is None else str(host)}
    return make_pass("stream", {**sizes, "always": settings.stream == "always", "cache": settings.cache})
