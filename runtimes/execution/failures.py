"""The errors of requests: what failed, on which device, and how much memory was asked for."""

from __future__ import annotations

import re

from onnxplace.bundle.manifest import Manifest, SegmentRecord, Step
from onnxplace.errors import ExecutionError, format_one_line

# How ONNX Runtime and C++ report that memory ran out.
_OUT_OF_MEMORY_TEXTS = (
    *("Failed to allocate memory", "bad allocation", "bad_alloc", "BFCArena", "out of memory"),
    "exceeds the max buffer size limit",  # WebGPU's, for one tensor
)
_REQUESTED_BYTES = re.compile(r"(?:requested (?:buffer of size|bytes of) |Buffer size \()(\d+)")
_MEMORY_HINT = "close other programs, run fewer requests at a time, or compile for smaller inputs or more devices"


def describe_segment_failure(
    problem: BaseException, record: SegmentRecord, manifest: Manifest, device: str
) -> ExecutionError:
    """Return the error of a segment that ONNX Runtime failed to run."""
    text = format_one_line(problem)
    if is_out_of_memory(problem):
        message = f"segment {record.id} ran out of memory: {_describe_request(text, record, manifest)}"
        return ExecutionError("X010", message + (f": {text}" if text else ""), where=device, hint=_MEMORY_HINT)
    message = f"segment {record.id} failed: {text or type(problem).__name__}"
    hint = "try the same feeds on the whole model: onnxplace verify"
    return ExecutionError("X001", message, where=device, hint=hint)


def describe_step_failure(problem: BaseException, step: Step | None, device: str) -> ExecutionError:
    """Return the error of a worker outside of ONNX Runtime, at a step of its program."""
    text = f"{type(problem).__name__}: {format_one_line(problem)}".rstrip(": ")
    if step is None:
        doing = "before its first step"
    elif step.op == "run":
        doing = f"at segment {step.segment}"
    else:
        peer = {"send": f" to {step.peer}", "receive": f" from {step.peer}"}.get(step.op, "")
        doing = f"at the step: {step.op} {step.value!r}{peer}"
    if is_out_of_memory(problem):
        return ExecutionError("X010", f"out of memory {doing}: {text}", where=device, hint=_MEMORY_HINT)
    return ExecutionError("X001", f"the worker failed {doing}: {text}", where=device)


def describe_output_failure(problem: BaseException, name: str) -> ExecutionError:
    """Return the error of an output that cannot be turned into an array."""
    text = format_one_line(problem) or type(problem).__name__
    if is_out_of_memory(problem):
        return ExecutionError("X010", f"out of memory for output {name!r}: {text}", where="outputs", hint=_MEMORY_HINT)
    return ExecutionError("X003", f"output {name!r} cannot be read: {text}", where="outputs")


def is_out_of_memory(problem: BaseException) -> bool:
    """Return whether an exception of ONNX Runtime, numpy or Python says that memory ran out."""
    return isinstance(problem, MemoryError) or any(words in str(problem) for words in _OUT_OF_MEMORY_TEXTS)


def _describe_request(text: str, record: SegmentRecord, manifest: Manifest) -> str:
    """Return how much memory a segment asked for, or else what the compiler predicted for it."""
    if requested := _REQUESTED_BYTES.search(text):
        return f"it asked for {_format_size(int(requested[1]))} at once"
    outputs = sum(manifest.values[name].bytes for name in record.outputs)
    predicted = f"{_format_size(outputs)} of outputs and {_format_size(record.workspace_bytes)} of workspace"
    return f"the bundle predicts {predicted} for it"


def _format_size(size: int) -> str:
    return f"{size} bytes" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB ({size} bytes)"
