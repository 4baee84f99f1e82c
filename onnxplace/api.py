"""The Python face: compile a model, load a bundle, run it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from onnxplace._stateful import Asked, bind_states
from onnxplace.bundle import MANIFEST, Bundle, Check
from onnxplace.costs import alone_seconds
from onnxplace.errors import InfeasibleError, UsageError, nearest
from onnxplace.facts import Emitted, Placement, Profile, Segments
from onnxplace.feeds import Array, Declared, check_feeds
from onnxplace.files import require_free
from onnxplace.machine import cuda_problem, gpus, local_target
from onnxplace.model import bind, require_beside
from onnxplace.model import load as load_model
from onnxplace.operators import require_operators
from onnxplace.pipeline import Observer, Pipeline, Timing
from onnxplace.placers import BAECHI, OBJECTIVES, Objective, choose_placer
from onnxplace.registry import find
from onnxplace.runtime import Result, Runtime
from onnxplace.sessions import custom_operators
from onnxplace.spec import PassSpec, format_pipeline, tuple_text
from onnxplace.state import Diagnostic, State
from onnxplace.target import Target, parse_memory

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
    """The keyword arguments of `compile`; `compile_model` says what they mean."""

    devices: str | Sequence[str] | None
    target: Target | None
    max_memory: str | None
    shape: Mapping[str, int] | None
    inputs: Mapping[str, Array] | None
    state: Asked
    costs: str | Path | None
    save_costs: str | Path | None
    cache: bool
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


def compile(  # noqa: A001
    model: str | Path | ModelProto, output: str | Path | None = None, **options: Unpack[CompileOptions]
) -> Bundle:
    """Compile an ONNX model for several devices and return the bundle written to `output`.

    Options are those of `compile_model`. Raises OnnxplaceError; nothing is left behind then.

    >>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
    """
    return compile_model(model, output, **options).bundle


def compile_model(
    model: str | Path | ModelProto,
    output: str | Path | None = None,
    *,
    devices: str | Sequence[str] | None = None,
    target: Target | None = None,
    max_memory: str | int | None = None,
    shape: Mapping[str, int] | None = None,
    inputs: Mapping[str, Array] | None = None,
    state: Asked = (),
    costs: str | Path | None = None,
    save_costs: str | Path | None = None,
    cache: bool = True,
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
    """Compile a model; the keyword arguments are the options of `onnxplace compile`.

    `output` defaults to the model's name with `.bundle`. `placer` may carry options, `auto{seconds=10}`; default:
    the one for the `objective`, which may search for `budget_seconds`. `target` describes devices that may be
    elsewhere, else `devices` of this machine are used. `state` binds outputs to inputs of the next call, as a mapping
    or as texts `OUT=IN`, each `*` standing for the same text on both sides. `link_weights` leaves the weights in the
    model's own files, in or above whose folder `output` must be. `custom_op_libraries` are shared libraries
    with operators that ONNX Runtime has not. `costs` is a cost file, `save_costs` where to write one; `cache` says
    whether what was measured before may be used (docs/costs.md). `observer` is told of each pass before it runs.
    """
    from onnx import ModelProto

    if not isinstance(model, (str, Path, ModelProto)):
        raise UsageError("U049", f"a {type(model).__name__} is no model", hint="give a path or an onnx.ModelProto")
    if isinstance(device_map, Mapping):
        device_map = json.dumps(dict(device_map))
    if target is not None and devices is not None:
        raise UsageError(
            "U040", "--devices and --target exclude each other", hint="name the devices in the target file"
        )
    path = Path(output) if output else _default_output(model)
    if pipeline is not None and (placer or objective != "latency" or budget_seconds is not None):
        message = "--pipeline excludes --placer, --objective and --budget"
        raise UsageError("U044", message, hint="name the placer in the pipeline, as in auto{seconds=10}")
    if pipeline is None:
        chosen = choose_placer(placer, objective, budget_seconds, seed or None)
        profile = {"costs": str(costs or ""), "save": str(save_costs or ""), "cache": "" if cache else "false"}
        steps = _default_pipeline(chosen, profile, str(device_map or ""), tuple(colocate), seed)
    else:
        steps = _given_pipeline(pipeline, bool(costs or save_costs or not cache or device_map or colocate or seed))
    text = str(steps)
    _require_one_emit(steps)
    require_free(path, force, MANIFEST)
    target = target or local_target(devices)
    if max_memory:
        target = target.limiting(parse_memory(str(max_memory), [device.id for device in target.devices]))
    loaded = bind_states(bind(load_model(model), shape or {}, inputs or {}), state)
    with custom_operators(custom_op_libraries):
        require_operators(loaded)
    facts = State(target).having(loaded).saying(*_unused_gpus(target, devices))
    emit = replace(steps.passes[-1], path=str(path), force=force, pipeline=text)  # type: ignore[call-arg]
    if link_weights or getattr(emit, "link_weights", False):
        require_beside(loaded, path)
        emit = replace(emit, link_weights=True)  # type: ignore[call-arg]
    steps = Pipeline((*steps.passes[:-1], emit))
    with custom_operators(custom_op_libraries):
        facts, timings = _run(steps, facts, strict, observer)
    return Compiled(Bundle.open(facts[Emitted].path), text, timings, facts.diagnostics)


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


def _default_output(model: object) -> Path:
    if not isinstance(model, (str, Path)) or not Path(model).name:
        return Path("model.bundle")
    return Path(model).with_suffix(".bundle")


def _given_pipeline(given: str | Pipeline, has_options: bool) -> Pipeline:
    """Return the user's pipeline; raises UsageError if options are given that belong into it."""
    if has_options:
        raise UsageError(
            "U042",
            "--pipeline excludes --costs, --save-costs, --no-cache, --device-map, --colocate and --seed",
            hint="write them into it: profile{costs=F,seed=1},coplace{device_map=F,colocate=REGEX}",
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
        for key, value in (("colocate", tuple_text(colocate) if colocate else ""), ("device_map", device_map))
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
    """Run the pipeline, pausing once the placement is final to say which devices got no work."""
    steps.require(state.facts)
    names = [step.name for step in steps.passes]
    pause = names.index("emit") if "emit" in names else len(names)

    def told(offset: int) -> Observer | None:
        return (lambda name, index, _: observer(name, index + offset, len(names))) if observer else None

    state, first = Pipeline(steps.passes[:pause]).run(state, told(0))
    unused = _unused_devices(state)
    if unused and strict:
        raise InfeasibleError(
            "P010",
            unused[0].message,
            where=unused[0].where,
            hint="drop it from --devices, try another --placer, or compile without --strict",
        )
    state, second = Pipeline(steps.passes[pause:]).run(state.saying(*unused, *_slower_than_one(state)), told(pause))
    return state, first + second


def _unused_devices(state: State) -> list[Diagnostic]:
    if Placement not in state or state[Placement].placer == OBJECTIVES["fit"]:  # few devices is what fit is for
        return []
    used = set(state[Placement].device.tolist())
    return [
        Diagnostic(
            "P010",
            f"this device was asked for and gets no work from placer {state[Placement].placer!r}",
            where=device.id,
            hint="try another --placer, or leave it out",
        )
        for index, device in enumerate(state.target.devices)
        if index not in used
    ]


def _slower_than_one(state: State) -> list[Diagnostic]:
    """Say so when the best single device is expected to be faster than what was decided."""
    aims = (OBJECTIVES["throughput"], OBJECTIVES["fit"])  # they do not aim at the time of one step
    if Segments not in state or state[Placement].placer in aims or len(set(state[Placement].device.tolist())) < 2:
        return []
    step = state[Segments].simulation.makespan_seconds
    seconds = alone_seconds(state[Profile], state.target)
    best = int(seconds.argmin())
    if step <= seconds[best]:
        return []
    message = f"one device is expected to be faster: {seconds[best] * 1e3:.3g} ms a step, this {step * 1e3:.3g} ms"
    hint = "try --placer single, if the model fits there"
    return [Diagnostic("P011", message, where=state.target.devices[best].id, hint=hint)]


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
        for gpu in gpus()
    ]


def load(path: str | Path, check: Check = "small") -> Bundle:
    """Open a bundle; raises BundleError if it is damaged, unsafe or too new. `check="all"` hashes every file."""
    return Bundle.open(path, check)


class InferenceSession:
    """Run a bundle the way ONNX Runtime runs a model; a context manager.

    >>> with onnxplace.InferenceSession("model.bundle") as session:  # doctest: +SKIP
    ...     logits, = session.run(None, {"tokens": tokens})

    States (`onnxplace compile --state OUT=IN`) stay on their devices from run to run. The first run needs to be fed
    what they begin with; a state that is fed later replaces what was stored. Runs then follow one another in the
    order of their start, also those started by `run_async` and `submit` or from several threads. A run that fails
    loses the states; one that is refused for its inputs leaves them as they were.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        runtime: str = "onnxruntime",
        trace: bool = False,
        custom_op_libraries: Sequence[str | Path] = (),
    ) -> None:
        self._bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        kind = cast("type[Runtime]", find("runtimes", runtime))
        if self._bundle.manifest.states and not kind.keeps_state:
            hint = "use --runtime onnxruntime, or compile without --state"
            raise UsageError("S008", f"runtime {runtime!r} keeps no states", where=str(self._bundle.path), hint=hint)
        self._takes = _with_optional_states(self._bundle)
        self._known = [item.name for item in self._bundle.outputs]
        self._returned = [item.name for item in self._bundle.returned]
        self._kept = {item.output for item in self._bundle.manifest.states}
        with custom_operators(custom_op_libraries):
            self._session = kind().open(self._bundle, trace=trace)
        self._last: Result | None = None
        self._callbacks = ThreadPoolExecutor(1, "onnxplace callbacks")

    def get_inputs(self) -> list[Declared]:
        """Return the model's inputs: name, dtype, shape."""
        return self._bundle.inputs

    def get_outputs(self) -> list[Declared]:
        """Return the outputs that `run(None, ...)` gives: name, dtype, shape. States are not among them."""
        return self._bundle.returned

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> list[Any]:
        """Return the outputs asked for (None: all but states, which must be asked for by name) for these inputs.

        Raises FeedError for inputs that do not fit, UsageError for an unknown output, ExecutionError if a part fails.
        """
        names = self._names(output_names)
        feeds, also = self._checked(input_feed, names)
        result = self._session.run(feeds, also) if also else self._session.run(feeds)
        self._last = result
        return [result.outputs.get(name) for name in names]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any] | None, BaseException | None], None],
    ) -> None:
        """Start a run and return; `callback(outputs, error)` is called from another thread when it is over."""
        names = self._names(output_names)

        def over(future: Future[Result]) -> None:
            error = future.exception()
            callback(None if error else [future.result().outputs.get(name) for name in names], error)

        # Not on a worker of a device: a callback may take its time, run the session again, or close it.
        self.submit(input_feed, names).add_done_callback(lambda future: self._callbacks.submit(over, future))

    def submit(self, input_feed: Mapping[str, Any], output_names: Sequence[str] | None = None) -> Future[Result]:
        """Start a run and return a future of its Result; runs that are under way together overlap across devices.

        The result has every output but states, and of these those that are asked for.
        """
        feeds, also = self._checked(input_feed, self._names(output_names))
        return self._session.submit(feeds, also) if also else self._session.submit(feeds)

    def reset_state(self) -> None:
        """Forget all states: the next run has to be fed what they begin with. Runs under way are not touched."""
        self._session.reset_state()

    def trace(self) -> dict[str, Any]:
        """Return the timeline of the last `run` as Chrome trace JSON, which Perfetto opens; needs `trace=True`."""
        from onnxplace.report import chrome_trace

        return chrome_trace(self._last.events if self._last else (), self._bundle)

    def close(self) -> None:
        """End all threads; waits for runs that are under way. May be called twice."""
        self._session.close()
        self._callbacks.shutdown(wait=False)

    def _checked(self, input_feed: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the feeds as arrays, and the states among the outputs asked for."""
        return check_feeds(input_feed, self._takes), [name for name in names if name in self._kept]

    def _names(self, asked: Sequence[str] | None) -> list[str]:
        if isinstance(asked, str):
            raise UsageError("U050", f"output names are a list, not {asked!r}", hint=f"write [{asked!r}]")
        for name in asked or ():
            if name not in self._known:
                raise UsageError("U050", f"the model has no output {name!r}", hint=nearest(name, self._known))
        return list(asked or self._returned)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_callbacks"):
            self.close()


def _with_optional_states(bundle: Bundle) -> list[Declared]:
    """Return the inputs as a run takes them: states may be left out."""
    states = {item.name for item in bundle.state_inputs}
    return [replace(item, optional=True) if item.name in states else item for item in bundle.inputs]
