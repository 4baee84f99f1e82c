"""Compare a bundle with the unsplit model at other sizes of symbolic dimensions than the compiled ones.

Sizes that the user did not give are compared in a child process: some kernels of ONNX Runtime end the process for an
empty axis, which may arise inside the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isinf
from pathlib import Path
from typing import Any, Literal

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.errors import ExecutionError, FeedError, ModelError, NoteWarning, OnnxplaceError, format_names
from onnxplace.feeds.dimensions import symbols_of_dimension
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.isolated_sessions import DeviceProcess, serve_sessions
from onnxplace.machine.ort_sessions import list_operator_libraries, use_custom_operators, without_optimisations
from onnxplace.measure.compare import (
    MAX_OWN_ERRORS,
    UNREPEATABLE,
    Differences,
    ModelComparison,
    list_precisions,
    open_reference,
    rounds_to_few_values,
)
from onnxplace.measure.difference_causes import CPU, find_cause
from onnxplace.measure.step_inputs import StepInputs, choose_step_inputs
from onnxplace.model.empty_axes import ENDS_PROCESS
from onnxplace.model.loading import load
from onnxplace.passes.profiling.node_errors import run_nodes
from onnxplace.pipeline.registry import create_runtime
from onnxplace.runtime.interface import RuntimeSession
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.subprocesses import start_child

Compare = Callable[[StepInputs], Differences]

# A trial compares only models that are opened, and run on the host, within a moment.
MAX_COMPARED_BYTES, MAX_COMPARED_SECONDS = 128 << 20, 0.1
# Devices other than CPUs may be this many times faster than the host.
ACCELERATION = 100
# Sizes that a trial tries until the model takes one choice.
MAX_TRIED = 12


@dataclass(frozen=True)
class SizeComparison:
    """A comparison of a bundle with the unsplit model at one choice of sizes."""

    sizes: Mapping[str, int]
    """Sizes of symbolic dimensions, by name."""
    steps: Differences = ()
    """Empty if these sizes are refused."""
    refused_by: Literal["", "bundle", "model"] = ""
    message: str = ""
    """The error of the one that refuses them."""
    plan: int | None = None
    """Index of the plan that ran, of several; None for a session, which chooses one for each request."""

    @property
    def result(self) -> Literal["equal", "differs", "refused", "skipped"]:
        """Return the verdict: sizes that the model itself refuses are skipped."""
        if self.refused_by:
            return "skipped" if self.refused_by == "model" else "refused"
        return "equal" if all(item.equal for step in self.steps for item in step) else "differs"

    @property
    def is_fatal(self) -> bool:
        """Return whether ONNX Runtime ends the process that runs the unsplit model at these sizes."""
        return ENDS_PROCESS in self.message

    @property
    def text(self) -> str:
        """Return the sizes as `--shape` takes them, of many the first ones, and the plan, if there are several."""
        sizes = format_names((f"{name}={size}" for name, size in self.sizes.items()), quoted=False)
        return sizes if self.plan is None else f"{sizes or 'fixed sizes'} by plan {self.plan}"


def compare_other_sizes(
    compare: Compare, steps: StepInputs, count: int, fixed: Iterable[str] = ()
) -> Iterator[SizeComparison]:
    """Yield comparisons until the model has taken `count` other sizes of each dimension, or all have been tried.

    Args:
        compare: Compares with the unsplit model, which runs first, on such inputs.
        steps: Inputs of the sizes from which the others differ.
        count: Number of other sizes of each dimension.
        fixed: Dimensions that keep their sizes.
    """
    kept = {symbol for name in fixed for symbol in (name, *symbols_of_dimension(name))}
    missing = {name: count for name in steps.sizes if name not in kept}
    for sizes in list_other_sizes(steps.sizes, missing):
        changed = [name for name in missing if sizes[name] != steps.sizes[name]]
        if all(missing[name] <= 0 for name in changed):
            continue
        comparison = compare_size(compare, steps, sizes)
        yield comparison
        for name in changed if comparison.refused_by != "model" else ():
            missing[name] -= 1


def list_other_sizes(sizes: Mapping[str, int], names: Iterable[str]) -> list[dict[str, int]]:
    """Return other sizes to try of the dimensions `names`.

    First those in which all dimensions change, each to a different size; then all in the same way, as sizes without a
    common name may have to be equal; then one dimension at a time.

    >>> list_other_sizes({"batch": 4}, ["batch"])[:3]
    [{'batch': 5}, {'batch': 1}, {'batch': 3}]
    """
    options = {}
    for name in names:
        own = sizes[name]
        options[name] = [size for size in dict.fromkeys((own + 1, 1, 3, 2 * own, own // 2, 7)) if size not in (0, own)]
    turns = range(max(map(len, options.values()), default=0))
    choices = [
        *({name: turn + place for place, name in enumerate(options)} for turn in turns),
        *(dict.fromkeys(options, turn) for turn in turns),
        *({name: turn} for turn in turns for name in options),
    ]
    changes = [
        {name: options[name][index % len(options[name])] for name, index in choice.items()} for choice in choices
    ]
    others = [{**sizes, **change} for change in changes]
    return list({tuple(other.values()): other for other in others}.values())


def compare_size(compare: Compare, steps: StepInputs, sizes: Mapping[str, int]) -> SizeComparison:
    """Return the comparison at one choice of sizes, which the model or the bundle may refuse."""
    inputs = None
    try:
        inputs = steps if sizes == steps.sizes else steps.resize(sizes)
        return SizeComparison(sizes, compare(inputs))
    except (ExecutionError, FeedError, ModelError) as problem:
        # Inputs of these sizes cannot be drawn if they do not fit into memory, or an expression has no such value.
        by_model = inputs is None or isinstance(problem, ModelError)
        return SizeComparison(sizes, (), "model" if by_model else "bundle", problem.message)


@contextmanager
def _open_trial(path: Path, optimised: bool) -> Iterator[tuple[Compare, RuntimeSession]]:
    """Open a bundle and the unsplit model; yield what compares them, without their states."""
    bundle = Bundle.open(path)
    runtime = create_runtime("onnxruntime")
    with nullcontext() if optimised else without_optimisations(), runtime.open(bundle) as session:
        comparison = ModelComparison(bundle, None, available_cores(), [item.name for item in bundle.returned_outputs])
        yield lambda steps: comparison.compare(lambda feeds: session.run(feeds).outputs, steps, 1), session


def may_be_rounding(bundle: Bundle, comparisons: Sequence[SizeComparison]) -> bool:
    """Return whether outputs differ by rounding if they are equal without ONNX Runtime's optimisations.

    They differ by at most twice as much as the unsplit model from itself, or the model rounds to few values.
    """
    differing = [item for one in comparisons for step in one.steps for item in step if not item.equal]
    is_small = all(item.max_abs_error <= MAX_OWN_ERRORS * item.own_error for item in differing)
    return (is_small and all(one.result != "refused" for one in comparisons)) or rounds_to_few_values(bundle)


def takes_long(weight_bytes: int, step_seconds: float) -> bool:
    """Return whether a trial does not compare a model with such weights and such a step on the host."""
    return weight_bytes > MAX_COMPARED_BYTES or step_seconds > MAX_COMPARED_SECONDS


def compare_at_another_size(bundle: Bundle) -> tuple[str, ...]:
    """Raise ExecutionError if a bundle differs from the unsplit model at one other choice of sizes.

    Returns notes: sizes at which ONNX Runtime ends the process, and outputs that two equal runs of the unsplit model
    compute otherwise. There is no comparison if that takes long, or if rounding alone may change an output by much.
    States are not compared: a training step's depend on the sign of the least gradient.
    """
    manifest = bundle.manifest
    stored_bytes = sum(item.bytes for item in (*manifest.files.values(), *manifest.linked.values()))
    seconds = manifest.predicted.single_device_seconds
    if any(device.kind != "cpu" for device in manifest.target.devices):
        seconds *= ACCELERATION
    is_rounded = rounds_to_few_values(bundle) or set(list_precisions(bundle).values()) - {"float32"}
    if takes_long(stored_bytes, seconds) or is_rounded:
        return ()
    try:
        first = choose_step_inputs(bundle, None, {}, 0)
    except FeedError:  # such inputs cannot be drawn
        return ()
    tried = list[SizeComparison]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoteWarning)  # that the host computes this size
        with compare_in_child(partial(_open_trial, bundle.path, True), bundle.path, None) as compare:
            for item in islice(compare_other_sizes(compare, first, 1), MAX_TRIED):
                tried.append(item)
                if item.result != "skipped":
                    break
        if tried and tried[-1].result == "differs" and may_be_rounding(bundle, tried[-1:]):
            with compare_in_child(partial(_open_trial, bundle.path, False), bundle.path, None) as compare:
                tried.append(compare_size(compare, first, tried[-1].sizes))
    if tried and tried[-1].result == "differs":
        last = tried[-1]
        cause = find_cause(bundle, None, first.resize(last.sizes), last.steps)
        name = next(output.name for output in last.steps[0] if not output.equal)
        message = f"output {name!r} differs from the unsplit model's with {last.text}; {cause.message}"
        hint = f"{cause.hint}; --no-trial writes the bundle all the same, for `onnxplace verify`"
        raise ExecutionError("C022", message, where=manifest.model, hint=hint)
    fatal = [f"with {item.text}, {item.message}" for item in tried if item.is_fatal]
    unsure = {output.name for item in tried for step in item.steps for output in step if isinf(output.own_error)}
    return (*fatal, *(f"output {name!r}: {UNREPEATABLE}" for name in sorted(unsure)))


# ------------------------------------------------------------------------------------------------ in a child process


_early: ContextVar[DeviceProcess | None] = ContextVar("early", default=None)


def start_early(stack: ExitStack) -> None:
    """Start the child for the next comparison, which need not wait for its imports then; it ends with the stack."""
    process = _make_process()
    stack.callback(process.drop, 0)
    with suppress(OSError):  # there may be no need for it; the comparison that needs it says what is wrong
        process.start()
        stack.callback(_early.reset, _early.set(process))


def await_early() -> None:
    """Wait until the child that starts, if one does, has imported what it needs: it takes no time of what follows."""
    if process := _early.get():
        with suppress(ExecutionError):  # it has died; the comparison starts another one
            process.call("", _close, 0)


def _make_process() -> DeviceProcess:
    process = DeviceProcess(CPU, _serve)
    process.sessions[0] = ()  # it ends with its last one
    return process


def _serve(blocks: Sequence[int]) -> None:
    """Serve sessions in a child that has imported what comparisons need."""
    create_runtime("onnxruntime")
    serve_sessions(blocks)


@contextmanager
def compare_in_child(
    open_comparison: Callable[[], AbstractContextManager[tuple[Compare, Any]]], bundle: Path, against: str | Path | None
) -> Iterator[Compare]:
    """Yield a function that compares in a child process, which starts with the first call, and again after its end.

    Where the process ends, the function raises ModelError if the unsplit model ends it, and names the node, or else
    ExecutionError.

    Args:
        open_comparison: A picklable function, whose context yields the function to call there, and a session.
        bundle: The path of the bundle that is compared.
        against: The unsplit model's file; None for the bundle's copy.
    """
    process = _early.get()
    _early.set(None)

    def compare(steps: StepInputs) -> Differences:
        nonlocal process
        differences: Differences
        try:
            if process is None or process.ended.is_set():
                process = _make_process()
            differences, notes = process.call("", _compare_here, 0, open_comparison, list_operator_libraries(), steps)
        except ExecutionError:
            if process is None or not process.ended.is_set():
                raise
            end = process.describe_end()
            process.drop(0)
            raise _explain_end(end, bundle, against, steps.first) from None
        for note in notes:
            warnings.warn(NoteWarning(note), stacklevel=2)
        return differences

    try:
        yield compare
    finally:
        if process and not process.ended.is_set():
            process.call("", _close, 0)
        if process:
            process.drop(0)


def _compare_here(
    opened: dict[int, Any], _: int, __: Any, open_comparison: Any, libraries: Sequence[str], steps: StepInputs
) -> Any:
    """Compare in the child, and return the notes of sessions, too."""
    if not opened:
        stack = ExitStack()
        stack.enter_context(use_custom_operators(libraries))
        opened |= {1: stack.enter_context(open_comparison()), 0: stack}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoteWarning)
        differences = opened[1][0](steps)
    return differences, [item.message.note for item in caught if isinstance(item.message, NoteWarning)]


def _close(opened: dict[int, Any], *_: Any) -> None:
    if opened:
        opened[0].close()


def _explain_end(end: str, bundle: Path, against: str | Path | None, feeds: Mapping[str, Any]) -> OnnxplaceError:
    """Return the error for a process that ended, by whether the unsplit model alone ends one, and with which node."""
    with temporary_folder() as folder:
        job = (bundle, against, feeds, list_operator_libraries(), folder / "running")
        with start_child(_run_model, job) as child:
            child.describe_end()
            place = job[-1].read_text(encoding="utf-8") if job[-1].exists() else ""
            if not child.answer.exists() and place:
                return ModelError("M017", f"{ENDS_PROCESS} in {place}: {end}", where=str(against or bundle))
    return ExecutionError("X004", f"the comparison failed in a process of its own: {end}", where=str(bundle))


def _run_model(job: tuple[Path, str | Path | None, Mapping[str, Any], Sequence[str], Path]) -> None:
    """Run the unsplit model node by node and then as a whole, and write to a file which one runs."""
    path, against, feeds, libraries, running = job
    with use_custom_operators(libraries):
        bundle, values = Bundle.open(path), dict(feeds)
        try:
            model = load(against or bundle.file(WHOLE_MODEL_FILE))
            for index, node in enumerate(model.nodes):
                running.write_text(f"node {node.name!r} ({node.op_type})", encoding="utf-8")
                values |= run_nodes(model, [index], [name for name in node.output if name], values, CPU, "none")
            running.write_text("the unsplit model", encoding="utf-8")
        except Exception as problem:  # noqa: BLE001 - a node that cannot run alone
            if ENDS_PROCESS not in str(problem):  # a guard, which the file `against` does not have
                running.write_text("the unsplit model", encoding="utf-8")
        open_reference(bundle, against, available_cores())(feeds)
