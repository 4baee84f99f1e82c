"""Choose the passes of a compilation, and the folder of its bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxplace.driver.options import CompileSettings
from onnxplace.errors import UsageError
from onnxplace.pipeline import BAECHI, PassSpec, Pipeline, choose_placer, format_pipeline, format_tuple


def choose_pipeline(settings: CompileSettings) -> Pipeline:
    """Return the user's pipeline, or the default one around a placer.

    Raises UsageError unless it writes exactly one bundle, at its end.
    """
    steps = _build_default(settings) if settings.pipeline is None else _parse_given(settings)
    _require_one_emit(steps)
    return steps


def _parse_given(settings: CompileSettings) -> Pipeline:
    """Return the user's pipeline; raises UsageError for options that belong into it."""
    if settings.sets_pass_options:
        raise UsageError(
            "U042",
            "--pipeline excludes --costs, --save-costs, --no-cache, --device-map, --colocate and --seed",
            hint="write them into it: profile{costs=F,save=F,cache=false,seed=1},coplace{device_map=F,colocate=REGEX}",
        )
    given = settings.pipeline
    return given if isinstance(given, Pipeline) else Pipeline.parse(given or "")


def _build_default(settings: CompileSettings) -> Pipeline:
    """Return the default pipeline around a placer.

    Baechi's placers need nodes joined to their readers first; placers that search decide on that themselves.
    """
    placer = choose_placer(settings.placer, settings.objective, settings.budget_seconds, settings.seed or None)
    profile = {
        "costs": str(settings.costs or ""),
        "save": str(settings.save_costs or ""),
        "cache": "" if settings.cache else "false",
        "seed": str(settings.seed or ""),
    }
    colocate = tuple(settings.colocate)
    coplace = {
        "join": "" if placer.name in BAECHI else "never",
        "colocate": format_tuple(colocate) if colocate else "",
        "device_map": settings.device_map_text,
    }
    specs = [
        PassSpec("optimize"),
        PassSpec("profile", _drop_empty(profile)),
        *_build_shard(settings),
        PassSpec("coplace", _drop_empty(coplace)),
        PassSpec("fuse"),
        placer,
        PassSpec("split"),
        PassSpec("emit"),
    ]
    return Pipeline.parse(format_pipeline(specs))


def _build_shard(settings: CompileSettings) -> list[PassSpec]:
    """Return the pass that splits operators, if the user asked for it."""
    ways = settings.shard_ways
    if ways is None or ways == 1:
        return []
    options = {
        "ways": str(ways or ""),
        "stages": "0" if settings.objective == "throughput" else "",
        "weights": "least" if settings.objective == "fit" else "",
        "metadata": "true" if settings.shard_metadata else "",
        "map": settings.shard_map_text,
    }
    return [PassSpec("shard", _drop_empty(options))]


def _drop_empty(options: dict[str, str]) -> dict[str, str]:
    """Return the options that are not left at their defaults."""
    return {key: value for key, value in options.items() if value}


def _require_one_emit(steps: Pipeline) -> None:
    """Raise UsageError unless the pipeline writes one bundle, at its end."""
    names = [step.name for step in steps.passes]
    if "emit" in names and names.index("emit") == len(names) - 1:
        return
    message = "the pipeline continues after it wrote its bundle" if "emit" in names else "the pipeline writes no bundle"
    raise UsageError("U041", message, where=f"pipeline {steps}", hint="end it with split,emit")


def redirect_emit(folder: Path, steps: Pipeline, link_weights: bool) -> Pipeline:
    """Return a pipeline that writes to a folder and records the original."""
    emit = replace(steps.passes[-1], path=str(folder), pipeline=str(steps))  # type: ignore[call-arg]
    if link_weights:
        emit = replace(emit, link_weights=True)  # type: ignore[call-arg]
    return Pipeline((*steps.passes[:-1], emit))


def choose_output(model: object, output: str | Path | None, steps: Pipeline) -> Path:
    """Return the folder of the bundle.

    That is `output`, else the path in the pipeline, else the path of the model with the ending `.bundle`. Raises
    UsageError for an empty name, which Path reads as the working folder.
    """
    if output is not None:
        return _parse_output(output)
    emit = steps.passes[-1]
    if (path := getattr(emit, "path", "")) != getattr(type(emit), "path", ""):
        return Path(path)
    if not isinstance(model, (str, Path)) or not Path(model).name:
        return Path("model.bundle")
    return Path(model).with_suffix(".bundle")


def _parse_output(output: object) -> Path:
    if not isinstance(output, (str, Path)):
        raise UsageError("U032", f"expected a path, got {output!r}", where="output", hint="name a new folder")
    if not str(output):
        raise UsageError("U032", "expected the name of a folder, got ''", where="output", hint="name a new folder")
    return Path(output)
