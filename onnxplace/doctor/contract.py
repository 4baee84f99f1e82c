"""Check the contract of runtimes on some devices."""

from __future__ import annotations

from onnxplace.doctor.context import CheckContext, CheckFailedError, CheckSkippedError, Finding


def check_contract(context: CheckContext) -> Finding:
    """Run the contract tests that plugins use, with the default runtime."""
    from onnxplace.pipeline import find_plugin
    from onnxplace.testing import check_runtime

    if any("{" in device for device in context.devices):
        raise CheckSkippedError("the contract tests take no options of devices")
    runtime = find_plugin("runtimes", "onnxruntime")
    try:
        check_runtime(runtime, devices=context.ids)
    except AssertionError as problem:
        raise CheckFailedError(str(problem)) from None
    return Finding("requests, failures, cancellation, closing, states and conversations")
