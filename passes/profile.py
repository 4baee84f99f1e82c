"""Find out what each node costs on each class of device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from onnxplace.errors import Diagnostic, counted
from onnxplace.facts import Profile, Repeat, Source
from onnxplace.graph import Floats, Ints, OpGraph
from onnxplace.machine import DOUBTFUL_WAITING_SHARE, MIN_RUNS, available_cores, cuda_problem, list_gpus
from onnxplace.model import Model, join_quantised_units, op_graph, static_shapes, value_bytes
from onnxplace.passes.cost_files import (
    ImportedCosts,
    format_costs,
    format_costs_csv,
    is_foreign_file,
    read_costs,
    read_foreign,
)
from onnxplace.passes.profiling import (
    Feeds,
    Measurement,
    MeasurementOptions,
    PeakRates,
    cut_into_chunks,
    estimate_seconds,
    find_repeats,
    fingerprints,
    measure_chunks,
    measure_peaks,
    measurement_key,
    node_kinds,
    pool_by_kind,
    recall_measurement,
    session_bytes,
    store_measurement,
)
from onnxplace.state import Pass, State
from onnxplace.target import Device
from onnxplace.utils import write_file

DOUBTFUL = "C004"


@dataclass(frozen=True)
class _Asked:
    """The model as it is measured: its structure before any time is known."""

    model: Model
    shapes: Mapping[str, tuple[int, ...]]
    graph: OpGraph
    kinds: Ints
    prints: tuple[str, ...]
    repeats: tuple[Repeat, ...]

    @staticmethod
    def of(model: Model, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> _Asked:
        graph, kinds = op_graph(model, sizes), node_kinds(model, shapes)
        return _Asked(model, shapes, graph, kinds, fingerprints(model, shapes), find_repeats(kinds, graph))


@dataclass(frozen=True)
class ProfileCosts(Pass):
    """Measure the model with ONNX Runtime, once per class of device, node by node.

    A model that needs more memory than any device of a class has is measured in pieces that fit, equal ones once.
    Nodes that do the same to values of the same shapes cost the same: the median of what they took.

    Costs come from a cost file if one is given, else from what was measured before, else from measurement on a device
    of that class here, else from a roofline estimate, which is marked as such (docs/costs.md). Needs a value for every
    symbolic dimension.
    """

    name: ClassVar[str] = "profile"
    requires: ClassVar[tuple[type, ...]] = (Model,)
    provides: ClassVar[tuple[type, ...]] = (Profile,)

    repeat: Annotated[int, Ge(1)] = 100
    """Most measured runs per class of device, after two for warming up."""
    seconds: Annotated[float, Ge(0)] = 5.0
    """Stop repeating after this long, though not before three runs."""
    tolerance: Annotated[float, Ge(0)] = 0.02
    """Stop repeating when the standard error of the median run is below this share of it."""
    costs: str = ""
    """A cost file (JSON or CSV) to read instead of measuring; or one of ONNX Runtime or Olive, which holds less."""
    save: str = ""
    """Write what was found out there as a cost file, as CSV if its name ends so."""
    cache: bool = True
    """Use what was measured before for the same model, device and versions, and keep what is measured."""
    estimate: bool = False
    """Estimate everything, measure nothing."""
    seed: Annotated[int, Ge(0)] = 0
    """For the inputs that are drawn where the user gave none."""

    def run(self, state: State) -> State:
        model = state[Model]
        model.input_shapes()  # fails here, before any work, if a dimension has no value
        if self.costs and not is_foreign_file(self.costs):
            given, warnings = read_costs(self.costs, model, state.target)
            return self._saved(state.having(_in_units(given, model)).saying(*warnings))
        shapes = static_shapes(model)
        sizes = value_bytes(model, {**shapes, **model.input_shapes()})
        told = read_foreign(self.costs, model, shapes, sizes) if self.costs else ImportedCosts()
        asked = _Asked.of(model, shapes, sizes)
        limits: dict[str, int] = {}
        for device in state.target.devices:
            limits[device.cost_class] = max(device.memory_bytes, limits.get(device.cost_class, 0))
        measured: dict[str, Measurement] = {}
        notes = list(told.notes)
        for device in {d.cost_class: d for d in state.target.devices}.values():
            problem = "asked to estimate" if self.estimate else told.instead or _cannot_measure(device)
            if problem:
                basis = "peaks measured here" if self._calibrates(device) else "assumed peaks"
                message = f"costs are estimated from {basis}, not measured: {problem}"
                notes.append(Diagnostic("C001", message, where=device.cost_class))
            else:
                measured[device.cost_class], said = self._found(asked, device, limits[device.cost_class])
                notes += said
        sizes = {**told.value_bytes, **sizes}
        for found in measured.values():
            sizes = {**found.value_bytes, **sizes}
        doubtful = [d for d in state.target.devices if d.cost_class not in measured or not _all(measured[d.cost_class])]
        peaks = measure_peaks(available_cores()[0]) if any(self._calibrates(device) for device in doubtful) else None
        profile = _in_units(_profile(asked, state, sizes, measured, peaks, told), model)
        return self._saved(state.having(profile).saying(*notes, *_unknown_sizes(model, sizes, profile.unit)))

    def _calibrates(self, device: Device) -> bool:
        """Return whether peaks of this machine's processor are what an estimate for a device is made from."""
        return device.kind == "cpu" and not self.estimate

    def _found(self, asked: _Asked, device: Device, limit_bytes: int) -> tuple[Measurement, list[Diagnostic]]:
        """Return what was measured before, if that is kept, else measure and keep it."""
        feeds = asked.model.feeds(self.seed)
        if not self.cache:
            return self._measure(asked, device, limit_bytes, feeds)
        whole = session_bytes(asked.graph) <= limit_bytes
        how = (self.repeat, self.seconds, self.tolerance, None if whole else limit_bytes)
        name = measurement_key(asked.model, asked.graph, asked.prints, device, feeds, how)
        notes = []
        try:
            kept = recall_measurement(name, len(asked.graph))
            if kept is not None:
                return kept
        except ValueError as problem:
            notes.append(Diagnostic("C006", f"kept costs are not used: {problem}", where=device.cost_class))
        found, said = self._measure(asked, device, limit_bytes, feeds)
        try:
            if all(note.code != DOUBTFUL for note in said):
                store_measurement(name, found, said)
        except ValueError as problem:
            notes.append(Diagnostic("C006", f"costs are not kept: {problem}", where=device.cost_class))
        return found, said + notes

    def _measure(
        self, asked: _Asked, device: Device, limit_bytes: int, feeds: Feeds
    ) -> tuple[Measurement, list[Diagnostic]]:
        """Measure on one device, whole if that fits there, else in pieces that do."""
        timer = MeasurementOptions(
            device.id, available_cores()[: device.cores], self.repeat, self.seconds, self.tolerance
        )
        if session_bytes(asked.graph) <= limit_bytes:
            found = timer.measure(asked.model, feeds)[0]
            pools = replace(found, seconds=pool_by_kind(found.seconds, found.unit, found.ran, asked.kinds))
            return pools, _doubts(found, device, self.tolerance)
        pieces = cut_into_chunks(asked.graph, asked.repeats, limit_bytes)
        found = measure_chunks(asked.model, asked.graph, asked.kinds, pieces, feeds, timer)
        message = f"the model needs more than the {limit_bytes} bytes of a device: measured in {len(pieces)} pieces"
        if left := int((~found.measured).sum()):
            message += f"; {left} of {len(asked.graph)} nodes could not be run so, and are estimated"
        return found, [Diagnostic("C003", message, where=device.cost_class)]

    def _saved(self, state: State) -> State:
        """Write the profile as a cost file, if that was asked for."""
        if self.save:
            profile = state[Profile]
            text = format_costs_csv(profile, state[Model]) if self.save.endswith(".csv") else format_costs(profile)
            write_file(Path(self.save), lambda stream: stream.write(text.encode()))
        return state


def _doubts(found: Measurement, device: Device, tolerance: float) -> list[Diagnostic]:
    """Say so if the machine was busy, or the time of a run never became stable."""
    quality = found.quality
    if quality is None:
        return []
    # Few runs were asked for, or long ones leave no time for more: they need not be stable.
    unsure = quality.uncertainty - 2 * tolerance if quality.runs > MIN_RUNS else 0.0
    if max(quality.waiting, unsure) <= DOUBTFUL_WAITING_SHARE:
        return []
    message = (
        f"costs are less sure than usual: runs waited {quality.waiting:.0%} of their time for a core, which was taken "
        f"off, and their median is known to {quality.uncertainty:.1%}"
    )
    hint = "profile again when the machine is idle; costs like these are not kept"
    return [Diagnostic(DOUBTFUL, message, where=device.cost_class, hint=hint)]


def _in_units(profile: Profile, model: Model) -> Profile:
    """Return the profile with each operator and its quantisers as one unit, also where they were not run as one."""
    return replace(profile, unit=join_quantised_units(model, profile.unit))


def _cannot_measure(device: Device) -> str | None:
    """Say why a device's class cannot be measured here, or None."""
    if device.kind == "cuda":
        here = next((gpu.name for gpu in list_gpus() if gpu.index == device.index), None)
        if device.model and here is not None and device.model != here:
            return f"{device.id} here is a {here}"
        return cuda_problem(device.index)
    if device.cores > len(available_cores()):
        return f"it has {device.cores} cores, this machine {len(available_cores())}"
    return None


def _unknown_sizes(model: Model, sizes: Mapping[str, int], unit: Ints) -> list[Diagnostic]:
    """Say which values have no size; those that are made and read in one unit need none."""
    read = defaultdict(set)
    for index, reads in enumerate(model.reads):
        for name in reads:
            read[name].add(int(unit[index]))
    unknown = [
        name
        for index, node in enumerate(model.nodes)
        for name in node.output
        if name not in sizes and read[name] - {int(unit[index])}
    ]
    if not unknown:
        return []
    return [
        Diagnostic(
            "C002",
            f"the size of {counted(len(unknown), 'value')} is unknown and counts as zero, such as {unknown[0]!r}",
            where=model.name,
        )
    ]


def _all(found: Measurement) -> bool:
    return bool(found.measured.all())


def _profile(
    asked: _Asked,
    state: State,
    sizes: Mapping[str, int],
    measured: Mapping[str, Measurement],
    cpu_peaks: PeakRates | None,
    told: ImportedCosts,
) -> Profile:
    count = len(asked.model.nodes)
    seconds: dict[str, Floats] = {}
    sources: dict[str, NDArray[np.uint8]] = {}
    for cost_class, device in {device.cost_class: device for device in state.target.devices}.items():
        found = measured.get(cost_class)
        done = np.zeros(count, dtype=bool) if found is None else found.measured
        seconds[cost_class] = np.zeros(count) if found is None else found.seconds
        if not done.all():
            peaks = cpu_peaks if device.kind == "cpu" else None
            guess = estimate_seconds(asked.model, asked.shapes, cost_class, peaks)
            if told.work is not None:
                guess[told.work.nodes] = told.work.seconds(device, peaks)
            seconds[cost_class] = np.where(done, seconds[cost_class], guess)
        ran = np.where(True if found is None else found.ran, Source.MEASURED, Source.KNOWN)
        sources[cost_class] = np.where(done, ran, Source.ESTIMATED).astype(np.uint8)
    unit = next(iter(measured.values())).unit if measured else np.arange(count, dtype=np.int32)
    amounts = np.array([sizes.get(name, 0) for name in asked.graph.value_names], dtype=np.int64)
    workspace = asked.graph.workspace_bytes if told.workspace_bytes is None else told.workspace_bytes
    whole = {name: found.whole_seconds for name, found in measured.items() if found.whole_seconds is not None}
    quality = {name: found.quality for name, found in measured.items() if found.quality is not None}
    return Profile(
        replace(asked.graph, value_bytes=amounts, workspace_bytes=workspace),
        MappingProxyType(seconds),
        MappingProxyType(sources),
        unit,
        MappingProxyType(whole),
        repeats=asked.repeats,
        spread=MappingProxyType({name: found.spread for name, found in measured.items()}),
        quality=MappingProxyType(quality),
        prints=asked.prints,
    )
