"""Find the cost of each node on each class of device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from onnxplace.errors import Diagnostic, format_names
from onnxplace.facts import REFUSED_SECONDS, Profile, is_refused
from onnxplace.graph.op_graph import Floats
from onnxplace.machine.hardware import assign_cores, available_cores, find_measurement_obstacle, probe_device
from onnxplace.model.cut_constraints import find_host_values, join_quantised_units
from onnxplace.model.loading import require_weights
from onnxplace.model.lowering import infer_static_shapes, list_declared_shapes, value_bytes
from onnxplace.model.model import Model
from onnxplace.model.whole_numbers import find_changed_nodes
from onnxplace.model_metadata import Phase
from onnxplace.passes.cost_files.cost_file import format_costs, format_costs_csv, read_costs
from onnxplace.passes.profiling.node_measurement import Measurement, MeasurementOptions
from onnxplace.passes.profiling.profile_model import (
    ModelProfiler,
    ModelStructure,
    assemble_profile,
    report_unknown_sizes,
)
from onnxplace.passes.profiling.roofline import device_peaks, estimate_seconds, measure_peaks
from onnxplace.passes.sharding.space.known_shapes import infer_shapes_and_values, infer_with_runtime
from onnxplace.plugins import ask_plugins
from onnxplace.state import Pass, State
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import PRECISIONS, Device, Target
from onnxplace.utils.files import write_file
from onnxplace.utils.progress import progress_part


@dataclass(frozen=True)
class ProfileCosts(Pass):
    """Measure the model with ONNX Runtime, node by node.

    Each class of device is measured once. A model that needs more memory than any device of a class has is measured in
    pieces that fit, equal ones once, and so is one of a gigabyte or more whose layers repeat. Nodes that do the same to
    values of the same shapes cost the same: the median of their times.

    Costs come from a cost file if one is given, else from an earlier measurement, else from a measurement on a local
    device of that class, else from a roofline estimate, which is marked as such (docs/costs.md). Devices of this
    machine that change numbers of a type refuse nodes that compute with them. Needs a value for every symbolic
    dimension.
    """

    name: ClassVar[str] = "profile"
    requires: ClassVar[tuple[type, ...]] = (Model,)
    provides: ClassVar[tuple[type, ...]] = (Profile,)

    repeat: Annotated[int, Ge(1)] = 100
    """Most measured runs per class of device, after two for warming up."""
    seconds: Annotated[float, Ge(0)] = 0.6
    """Stop repeating after this long, though not before three runs."""
    tolerance: Annotated[float, Ge(0)] = 0.02
    """Stop repeating when the standard error of the median run is below this share of it, or no longer falls."""
    costs: str = ""
    """A cost file (JSON or CSV) to read instead of measuring."""
    save: str = ""
    """Write the costs to a cost file of this name, as CSV if it ends so."""
    cache: bool = True
    """Use earlier measurements of the same model, device and versions; new ones replace them in any case."""
    estimate: bool = False
    """Estimate everything, measure nothing, and ask no device what it computes."""
    thorough: bool = False
    """Measure the whole model if it fits, also where its layers repeat, and always run it without the profiler too."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the random inputs, where the user gave none."""

    def run(self, state: State) -> State:
        model = state[Model]
        inputs = model.input_shapes()  # fails before any work if a dimension has no value
        if self.costs:
            profile, notes = read_costs(self.costs, model, state.target)
            return self._finish(state, _join_units(profile, model), notes)
        shapes = infer_static_shapes(model)
        obstacles = {
            device.cost_class: "estimates were requested" if self.estimate else find_measurement_obstacle(device)
            for device in state.target.devices
        }
        if all(obstacles.values()):  # a measurement would tell what ONNX cannot infer
            known_shapes = {**list_declared_shapes(model), **infer_shapes_and_values(model)[0]}
            types = infer_with_runtime(model, inputs).types
        else:
            require_weights(model)
            known_shapes, types = shapes, {}
        sizes = value_bytes(model, {**known_shapes, **inputs}, types)
        structure = ModelStructure.of(model, shapes, sizes)
        measurements, notes = self._measure_classes(state, structure, obstacles)
        for measurement in measurements.values():
            sizes = {**measurement.value_bytes, **sizes}
        estimates = self._estimate_classes(state, replace(structure, shapes=known_shapes), measurements, types)
        classes = [device.cost_class for device in state.target.devices]
        profile = assemble_profile(structure, classes, sizes, measurements, estimates)
        profile = _join_units(profile, model)
        return self._finish(state, profile, [*notes, *report_unknown_sizes(model, sizes, profile.unit)])

    def _finish(self, state: State, profile: Profile, notes: Sequence[Diagnostic]) -> State:
        """Return the state with profile and notes; save the profile if `save` is set."""
        # Training steps and decoders carry states; plugins know what these are for.
        answer = ask_plugins("recognisers", state[Model], profile.graph) if state[Model].states else None
        roles, more = answer or (None, [])
        if roles is not None:
            profile = replace(profile, training=roles, backward=roles.phase == Phase.BACKWARD)
        profile = replace(profile, needs_host=any(find_host_values(state[Model])))
        profile, found = (profile, []) if self.estimate else _refuse_changed_types(profile, state[Model], state.target)
        after = state.with_facts(profile).with_notes(*notes, *found, *more)
        if self.save:
            text = format_costs_csv(profile, state[Model]) if self.save.endswith(".csv") else format_costs(profile)
            write_file(Path(self.save), lambda stream: stream.write(text.encode()))
        return after

    def _measure_classes(
        self, state: State, structure: ModelStructure, obstacles: Mapping[str, str | None]
    ) -> tuple[dict[str, Measurement], list[Diagnostic]]:
        """Measure each class of device that can be measured on this machine."""
        limits: dict[str, int] = {}
        for device, size in zip(state.target.devices, state.target.limit_bytes.tolist()):
            limits[device.cost_class] = max(size, limits.get(device.cost_class, 0))
        measurements: dict[str, Measurement] = {}
        notes: list[Diagnostic] = []
        devices = {device.cost_class: device for device in state.target.devices}
        for number, (cost_class, device) in enumerate(devices.items()):
            if reason := obstacles[cost_class]:
                assumed = "the target's peaks" if device.operations_per_second else "assumed peaks"
                basis = "peaks measured here" if self._uses_local_peaks(device) else assumed
                message = f"costs are estimated from {basis}, not measured: {reason}"
                notes.append(Diagnostic("C001", message, where=cost_class))
                continue
            (cores,) = assign_cores([device.cores])
            options = MeasurementOptions(
                device=device.address,
                cores=cores,
                repeat=self.repeat,
                seconds=self.seconds,
                tolerance=self.tolerance,
                thorough=self.thorough,
            )
            profiler = ModelProfiler(
                structure=structure,
                device=device,
                limit_bytes=limits[cost_class],
                options=options,
                use_cache=self.cache,
            )
            with progress_part(number, len(devices)):
                measurements[cost_class], class_notes = profiler.measure(structure.model.feeds(self.seed))
            notes += [*class_notes, *_report_hosts(state.target, cost_class)]
        return measurements, notes

    def _estimate_classes(
        self,
        state: State,
        structure: ModelStructure,
        measurements: Mapping[str, Measurement],
        types: Mapping[str, int],
    ) -> dict[str, Floats]:
        """Estimate seconds per node for classes that are not completely measured."""
        devices = {
            device.cost_class: device
            for device in state.target.devices
            if device.cost_class not in measurements or not measurements[device.cost_class].measured.all()
        }
        needs_peaks = any(self._uses_local_peaks(device) for device in devices.values())
        cpu_peaks = measure_peaks(available_cores()[0]) if needs_peaks else None
        estimates: dict[str, Floats] = {}
        for cost_class, device in devices.items():
            peaks = cpu_peaks if self._uses_local_peaks(device) else device_peaks(device)
            estimates[cost_class] = estimate_seconds(structure.model, structure.shapes, cost_class, peaks, types)
        return estimates

    def _uses_local_peaks(self, device: Device) -> bool:
        """Return whether estimates use peaks of this machine's processor: if the target does not give any."""
        return device.kind == "cpu" and not self.estimate and not device.operations_per_second


def _refuse_changed_types(profile: Profile, model: Model, target: Target) -> tuple[Profile, list[Diagnostic]]:
    """Return the profile where devices refuse nodes with types that they do not keep, and notes on what they compute.

    Devices are asked what they compute, as far as they are on this machine.
    """
    seconds, notes = dict(profile.seconds), list[Diagnostic]()
    for name, device in {item.cost_class: item for item in target.devices if not item.is_host}.items():
        if (traits := probe_device(device)) is None:
            continue
        declared = find_kind(device.kind).precision(device.address)
        if traits.precision and PRECISIONS.index(traits.least_precise) > PRECISIONS.index(declared):
            notes.append(Diagnostic("C009", f"{traits.describe()[0]}, where {declared} is declared", where=device.id))
        known = infer_shapes_and_values(model)[1] if traits.changes else {}
        for kind, found in traits.changes.items():
            refused = find_changed_nodes(model, kind, found, known) & ~is_refused(seconds[name])
            if refused.any():
                seconds[name] = np.where(refused, REFUSED_SECONDS, seconds[name])
                message = (
                    f"{refused.sum()} of {len(refused)} nodes stay elsewhere, because it computes {kind} as {found}"
                )
                notes.append(Diagnostic("C008", message, where=device.id))
    return replace(profile, seconds=MappingProxyType(seconds)), notes


def _report_hosts(target: Target, cost_class: str) -> list[Diagnostic]:
    """Return a note if a measurement on this machine stands for devices of hosts."""
    hosts = dict.fromkeys(device.host for device in target.devices if device.host and device.cost_class == cost_class)
    if not hosts:
        return []
    message = f"measured on this machine, and used for devices of {format_names(hosts, quoted=False)}"
    return [
        Diagnostic("C001", message, where=cost_class, hint="for other hardware: --costs of a bundle compiled there")
    ]


def _join_units(profile: Profile, model: Model) -> Profile:
    """Return the profile with operators and their quantisers as one unit."""
    return replace(profile, unit=join_quantised_units(model, profile.unit))
