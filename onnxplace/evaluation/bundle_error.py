"""The error of a bundle on some inputs, for `compile --max-error`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from onnxplace.bundle import Bundle, SplitStates, list_routes, move_to_route
from onnxplace.evaluation.compare import find_bundle_lineages, open_reference
from onnxplace.feeds import Array
from onnxplace.machine import available_cores
from onnxplace.pipeline import find_plugin
from onnxplace.runtime import Runtime
from onnxplace.utils import relative_error


def measure_error(bundle: Bundle, feeds: Mapping[str, Array]) -> float:
    """Return the largest error of an output, relative to its largest magnitude; the CPU runs the unsplit model.

    Each route of the bundle runs once. States are left out, and outputs that depend on random numbers.

    Raises:
        ExecutionError: a segment fails.
        TargetError: a device is missing.
    """
    lineages, feeds = find_bundle_lineages(bundle), SplitStates(bundle.manifest).align_copies(feeds)
    names = [item.name for item in bundle.returned_outputs if not lineages[item.name].random_nodes]
    expected = open_reference(bundle, None, available_cores())(feeds)
    runtime, errors = cast("type[Runtime]", find_plugin("runtimes", "onnxruntime"))(), [0.0]
    for route in list_routes(bundle.manifest):
        with runtime.open(Bundle(bundle.path, move_to_route(bundle.manifest, route))) as session:
            outputs = session.run(feeds).outputs
        errors += [relative_error(outputs[name], expected[name]) for name in names]
    return max(errors)
