"""Find out what each node costs on each class of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from onnxplace.facts import Profile, Source
from onnxplace.graph import Floats
from onnxplace.machine import cores, cuda_problem, gpus
from onnxplace.model import Model, op_graph, static_shapes, value_bytes
from onnxplace.passes._cost_file import read_costs
from onnxplace.passes._measure import Measurement, measure
from onnxplace.passes._roofline import estimate
from onnxplace.state import Diagnostic, Pass, State
from onnxplace.target import Device


@dataclass(frozen=True)
class ProfileCosts(Pass):
    """Measure the model with ONNX Runtime, once per class of device, node by node.

    Costs come from a cost file if one is given, else from measurement on a device of that class here, else from a
    roofline estimate, which is marked as such. Needs a value for every symbolic dimension.
    """

    name: ClassVar[str] = "profile"
    requires: ClassVar[tuple[type, ...]] = (Model,)
    provides: ClassVar[tuple[type, ...]] = (Profile,)

    repeat: Annotated[int, Ge(1)] = 9
    """Measured runs per class of device, after two for warming up."""
    seconds: Annotated[float, Ge(0)] = 5.0
    """Stop repeating after this long, though not before three runs."""
    costs: str = ""
    """A cost file to read instead of measuring."""
    estimate: bool = False
    """Estimate everything, measure nothing."""
    seed: Annotated[int, Ge(0)] = 0
    """For the inputs that are drawn where the user gave none."""

    def run(self, state: State) -> State:
        model = state[Model]
        model.input_shapes()  # fails here, before any work, if a dimension has no value
        if self.costs:
            return state.having(read_costs(self.costs, model, state.target))
        shapes = static_shapes(model)
        sizes = value_bytes(model, {**shapes, **model.input_shapes()})
        measured: dict[str, Measurement] = {}
        notes = []
        for device in {d.cost_class: d for d in state.target.devices}.values():
            problem = "asked to estimate" if self.estimate else _cannot_measure(device)
            if problem:
                notes.append(
                    Diagnostic("C001", f"costs are estimated, not measured: {problem}", where=device.cost_class)
                )
            else:
                own = cores()[: device.cores]
                measured[device.cost_class] = measure(
                    model, model.feeds(self.seed), device.id, own, self.repeat, self.seconds
                )
        for found in measured.values():
            sizes = {**found.value_bytes, **sizes}
        notes += _unknown_sizes(model, sizes)
        return state.having(_profile(model, state, shapes, sizes, measured)).saying(*notes)


def _cannot_measure(device: Device) -> str | None:
    """Say why a device's class cannot be measured here, or None."""
    if device.kind == "cuda":
        here = next((gpu.name for gpu in gpus() if gpu.index == device.index), None)
        if device.model and here is not None and device.model != here:
            return f"{device.id} here is a {here}"
        return cuda_problem(device.index)
    if device.cores > len(cores()):
        return f"it has {device.cores} cores, this machine {len(cores())}"
    return None


def _unknown_sizes(model: Model, sizes: Mapping[str, int]) -> list[Diagnostic]:
    read = {name for reads in model.reads for name in reads}
    unknown = [name for node in model.nodes for name in node.output if name in read and name not in sizes]
    if not unknown:
        return []
    return [
        Diagnostic(
            "C002",
            f"the size of {len(unknown)} values is unknown and counts as zero, such as {unknown[0]!r}",
            where=model.name,
        )
    ]


def _profile(
    model: Model,
    state: State,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    measured: Mapping[str, Measurement],
) -> Profile:
    seconds: dict[str, Floats] = {}
    sources: dict[str, NDArray[np.uint8]] = {}
    for cost_class in dict.fromkeys(device.cost_class for device in state.target.devices):
        if cost_class in measured:
            found = measured[cost_class]
            seconds[cost_class] = found.seconds
            sources[cost_class] = np.where(found.ran, Source.MEASURED, Source.KNOWN).astype(np.uint8)
        else:
            seconds[cost_class] = estimate(model, shapes, cost_class)
            sources[cost_class] = np.full(len(model.nodes), Source.ESTIMATED, dtype=np.uint8)
    single = np.arange(len(model.nodes), dtype=np.int32)
    unit = next(iter(measured.values())).unit if measured else single
    whole = {name: found.whole_seconds for name, found in measured.items()}
    return Profile(
        op_graph(model, sizes), MappingProxyType(seconds), MappingProxyType(sources), unit, MappingProxyType(whole)
    )
