"""Measure what nodes take with their weights as inputs, compared with constants.

A weight that streams is an input of its segment. ONNX Runtime prepares constants when it opens a session: it packs
factors, fuses, folds. With an input it does without, does it again in each run, or refuses the operator.

So each unit, the nodes of one kernel, is opened twice. In the second session its large weights are inputs with a
default value: no constants to ONNX Runtime, which still takes them from the model's files, and to the device when it
opens the session. Both sessions run in turns, so that other load of the machine slows both. Equal units are measured
once, each by itself: what neighbours gain from a constant is not seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from onnx import helper
from pydantic import TypeAdapter

from onnxplace.errors import OnnxplaceError
from onnxplace.facts import Profile, Source
from onnxplace.feeds.feeds import Declared
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.graph.op_graph import Csr, Floats, Ints
from onnxplace.machine import measurement_cache
from onnxplace.machine.hardware import available_cores, find_measurement_obstacle
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, pin_thread
from onnxplace.machine.ort_values import make_runner
from onnxplace.machine.repeated_runs import RepeatPolicy, Runs
from onnxplace.model.model import Model, store_for_session
from onnxplace.model.tensors import format_type
from onnxplace.model.weights import WeightFile
from onnxplace.passes.profiling.chunks import extract_nodes, name_outputs
from onnxplace.passes.profiling.compiled_runs import describe_run
from onnxplace.passes.profiling.profile_model import describe_class
from onnxplace.passes.profiling.repeated_layers import fingerprints
from onnxplace.target.target import Device
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.progress import progress_part

MIN_STREAMED_BYTES = 1 << 20
"""Smaller weights stay on their devices: each input of a segment takes time as well."""
# Turns of both sessions: until a time is over, but not fewer and not more than these.
TURN_SECONDS, MIN_TURNS, MAX_TURNS = 0.3, 5, 30
# Written before each run: of a model that is larger than memory, no weight is still in a cache from the step before.
CACHED_BYTES = 64 << 20
# What the CPU's provider takes to unpack one byte of a weight of a quantised kernel, which it does in each run unless
# the weight is a constant: 1 and 32 rows, 4 bits, one and two cores took 5 to 13 ns. For estimates.
UNPACKING_SECONDS_PER_BYTE = {"MatMulNBits": 9e-9}


def measure_streamed(
    model: Model,
    profile: Profile,
    devices: Sequence[Device],
    nodes: Iterable[int],
    *,
    shapes: Mapping[str, Sequence[int]],
    types: Mapping[str, int],
    cache: bool = True,
) -> dict[str, Floats]:
    """Return, per cost class and node, the time with large weights as inputs over the time with constants.

    A factor is that of the node's unit, for all of its weights of at least `MIN_STREAMED_BYTES` at once. It is 1 for
    units without any, and infinite where these cannot be inputs: ONNX Runtime refuses it, the provider compiles its
    models, or the unit reads nothing else, and is computed when the session is opened.

    It is measured, with random values, where costs are not estimates and the device is on this machine. Elsewhere, and
    for units that read values of unknown shape, it is 1, except for operators that unpack weights
    (`UNPACKING_SECONDS_PER_BYTE`). Of equal units one is opened, so that little is read of the model's files, and
    memory holds the weights of one unit twice.

    Args:
        model: The model.
        profile: Its costs and units.
        devices: Of the target.
        nodes: Those whose factors are wanted; others get 1, except for the rest of their units.
        shapes: Of values, by name, as far as they are known (`infer_shapes_and_values`).
        types: Element types of values whose types ONNX cannot infer (`infer_with_runtime`).
        cache: Use earlier measurements of equal units; new ones are stored anyway.
    """
    units = _StreamedUnits(model, profile, shapes, types, fingerprints(model, shapes))
    members = Csr.grouped(profile.unit, np.arange(len(profile.unit), dtype=np.int32), len(profile.unit))
    wanted = dict.fromkeys(profile.unit[list(nodes)].tolist())
    chosen = [members[unit] for unit in wanted if units.list_weights(members[unit])]
    classes, factors = {device.cost_class: device for device in devices}, dict[str, Floats]()
    for number, (cost_class, device) in enumerate(classes.items()):
        with progress_part(number, len(classes)):
            factors[cost_class] = units.find_factors(chosen, device, cache)
    return factors


@dataclass(frozen=True)
class _StreamedUnits:
    """The units of a model, and what they take with their large weights as inputs."""

    model: Model
    profile: Profile
    shapes: Mapping[str, Sequence[int]]
    types: Mapping[str, int]
    fingerprints: Sequence[str]

    def list_weights(self, unit: Ints) -> list[str]:
        """Return the names of the large weights that a unit reads."""
        graph = self.profile.graph
        weights = dict.fromkeys(weight for node in unit for weight in graph.weights[node].tolist())
        return [graph.weight_names[item] for item in weights if graph.weight_bytes[item] >= MIN_STREAMED_BYTES]

    def find_factors(self, units: Sequence[Ints], device: Device, cache: bool) -> Floats:
        """Return, per node, the factor of its unit on a class of device, for some units."""
        key, factors = measurement_cache.key(("streamed", *describe_class(device))), np.ones(len(self.profile.graph))
        stored = _read_factors(key)
        known: dict[str, float | None] = {**stored} if cache else {}
        count, is_here = len(known), find_measurement_obstacle(device) is None
        for number, unit in enumerate(units):
            with progress_part(number, len(units)):
                factors[unit] = self._find_factor(unit, device, known if is_here else None)
        if len(known) > count:
            with suppress(ValueError):  # a cache that cannot be written only costs time
                sure = {equal: factor for equal, factor in known.items() if factor is not None}
                measurement_cache.write(key, {"factors": {**stored, **sure}})
        return factors

    def _find_factor(self, unit: Ints, device: Device, known: dict[str, float | None] | None) -> float:
        """Return the factor of a unit, of which `known` takes those that are measured; None if the device is not here.

        A factor in `known` is None if the unit cannot be run by itself.
        """
        if device.compiles or not self._list_entering(unit):
            return math.inf
        factor = None
        if known is not None and (self.profile.sources[device.cost_class][unit] != Source.ESTIMATED).all():
            equal = self._describe(unit)
            if equal not in known:
                known[equal] = self._measure(unit, device)
            factor = known[equal]
        return self._estimate(unit, device) if factor is None else factor

    def _describe(self, unit: Ints) -> str:
        """Return the key of all equal units, also of other models."""
        entering = [(self._format_type(name), self.shapes.get(name)) for name in self._list_entering(unit)]
        return measurement_cache.key([repr((describe_run(self.profile.graph, self.fingerprints, unit), entering))])

    def _format_type(self, name: str) -> str:
        kind = self.model.types.get(name)
        return format_type(kind or helper.make_tensor_type_proto(self.types.get(name, 0), None))

    def _list_entering(self, unit: Ints) -> list[str]:
        """Return the names of the values that a unit reads from others."""
        graph, inside = self.profile.graph, set(unit.tolist())
        reads = dict.fromkeys(value for node in unit for value in graph.inputs[node].tolist())
        return [graph.value_names[value] for value in reads if int(graph.producer[value]) not in inside]

    def _estimate(self, unit: Ints, device: Device) -> float:
        graph, seconds = self.profile.graph, float(self.profile.seconds[device.cost_class][unit].sum())
        rates = UNPACKING_SECONDS_PER_BYTE if device.is_host else {}
        sizes = [int(graph.weight_bytes[graph.weights[node]].max(initial=0)) for node in unit]
        unpacking = sum(rates.get(graph.ops[node], 0.0) * size for node, size in zip(unit, sizes))
        return 1 + unpacking / seconds if seconds > 0 else 1.0

    def _measure(self, unit: Ints, device: Device) -> float | None:
        graph, entering = self.profile.graph, self._list_entering(unit)
        outputs = name_outputs(graph, unit.tolist())
        try:
            declared = [Declared(name, self._format_type(name), tuple(self.shapes[name])) for name in entering]
            values = random_feeds(declared, {})
            constant, feeds = extract_nodes(self.model, unit.tolist(), outputs, values, is_static=True)
        except (OnnxplaceError, KeyError):  # an unknown shape, a type without random values
            return None
        weights = [constant.initializers[name] for name in self.list_weights(unit)]
        inputs = [helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims) for weight in weights]
        with temporary_folder() as folder:
            constant = _move_weights(constant, folder)
            streamed = replace(constant, inputs=(*constant.inputs, *inputs))
            return _compare([constant, streamed], feeds, device, folder)


def _move_weights(model: Model, folder: Path) -> Model:
    """Return a model whose weights are in files, which sessions map: those in memory would be copied several times."""
    if model.inline_bytes < MIN_STREAMED_BYTES:
        return model
    with WeightFile(folder / "weights", "weights") as file:
        placed = {name: file.place(tensor, model.folder) for name, tensor in model.initializers.items()}
    return replace(model, initializers=MappingProxyType(placed), folder=folder)


def _compare(models: Sequence[Model], feeds: Mapping[str, Any], device: Device, folder: Path) -> float | None:
    """Return the time of the second of two models over that of the first.

    It is infinite if the second cannot be run, None if the first cannot.
    """
    runs, cores = list[Callable[[], object]](), available_cores()[: device.cores]
    with pin_thread(cores):
        for model in models:
            source, entries = store_for_session(model, folder)
            try:
                session = open_session(source, make_session_options(cores, "all", entries), device.address, model.name)
                runs.append(partial(make_runner(session, model.name), feeds))
                runs[-1]()
            except OnnxplaceError:
                return None if model is models[0] else math.inf
        policy, began, turns = RepeatPolicy(1, 0.0, 0.0), time.perf_counter(), list[list[Runs]]()
        cached = np.empty(CACHED_BYTES, dtype=np.uint8)
        while len(turns) < MIN_TURNS or (len(turns) < MAX_TURNS and time.perf_counter() - began < TURN_SECONDS):
            turns.append([])
            for run in runs:
                cached.fill(len(turns))
                turns[-1].append(policy.run(run, pool=len(cores) > 1)[0])
    constant, streamed = (Runs.join(of_model).seconds for of_model in zip(*turns))
    return streamed / constant


def _read_factors(key: str) -> dict[str, float]:
    """Return the factors that are stored under a key, by unit; none if they are damaged."""
    with suppress(ValueError):
        entry = measurement_cache.read(key) or {}
        return TypeAdapter(dict[str, Annotated[float, Ge(0)]]).validate_python(entry.get("factors", {}))
    return {}
