"""Compare at sizes that the user did not give, in a child process, which ONNX Runtime may end.

Some of its kernels end the process for an empty axis, which may arise inside the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from onnxplace.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.devices import DeviceAddress
from onnxplace.errors import ExecutionError, ModelError, NoteWarning, OnnxplaceError
from onnxplace.evaluation.compare import open_reference
from onnxplace.evaluation.own_differences import Differences
from onnxplace.evaluation.step_inputs import StepInputs
from onnxplace.machine import DeviceProcess, available_cores, list_operator_libraries, use_custom_operators
from onnxplace.model import ENDS_PROCESS
from onnxplace.utils import start_child, temporary_folder

Compare = Callable[[StepInputs], Differences]

CPU = DeviceAddress("cpu", 0)


@contextmanager
def compare_in_child(
    open_comparison: Callable[[], AbstractContextManager[tuple[Compare, Any]]],
    bundle: Path,
    against: str | Path | None,
) -> Iterator[Compare]:
    """Yield a function that compares in a child process, which starts with the first call, and again after its end.

    Where the process ends, the function raises ModelError if the unsplit model ends it, and names the node, or else
    ExecutionError.

    Args:
        open_comparison: A picklable function, whose context yields the function to call there, and a session.
        bundle: The path of the bundle that is compared.
        against: The unsplit model's file; None for the bundle's copy.
    """
    process: DeviceProcess | None = None

    def compare(steps: StepInputs) -> Differences:
        nonlocal process
        differences: Differences
        try:
            if process is None or process.ended.is_set():
                process = DeviceProcess(CPU)
                process.sessions[0] = ()  # it ends with its last one
            differences, notes = process.call("", _compare, 0, open_comparison, list_operator_libraries(), steps)
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


def _compare(
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
    from onnxplace.model import load
    from onnxplace.passes.profiling import run_nodes

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
