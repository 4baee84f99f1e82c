"""ONNX's own conformance suite, through `compile` with forced placements, against the suite's expected outputs.

The cases are those of `onnx.backend.test`, as installed. A case counts if plain ONNX Runtime passes it; then every
placement here must pass it too, as it is and surrounded: with an Identity before each input and after each output,
so that every value of a model of one node crosses a border.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import pkgutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.loader import DATA_DIR, load_model_tests
from onnx.backend.test.runner import Runner

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.machine.ort_values import to_ort_value, to_python
from onnxplace.model.model import MAX_IR_VERSION
from onnxplace.model.nested_graphs import rename_reads
from onnxplace.state import Pass
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device, Target
from tests.support.fault_checks import HUNG_SECONDS
from tests.support.random_placements import RandomPlacement

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")
HARD = ("loop", "_if", "scan", "sequence", "optional", "string", "strnorm", "int4", "float8", "bfloat16", "quantize")
"""Parts of names of cases that each can fail at a split in their own way."""
SLOW_TO_MAKE = ("averagepool", "lppool", "maxpool")
"""Modules of the suite whose outputs onnx computes in Python, in three quarters of the 5 s that all modules take."""
# Twice the distance of neighbours, relative to them, as much as the suite itself allows bfloat16.
FLOAT16_RTOL = 2**-9

Status = Literal[
    "passed",
    "passed to float16's precision",
    "failed",
    "refused by ONNX Runtime",
    "other results in ONNX Runtime",
    "not available",
]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Case:
    """A model of the suite with what it should compute."""

    name: str
    kind: str
    model: ModelProto
    data_sets: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    """Inputs and outputs in the model's order: arrays, lists of them, None."""
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    name: str
    kind: str
    status: Status
    detail: str = ""
    """Which placement failed, and how; or ONNX Runtime's words."""


# --- the suite ----------------------------------------------------------------------------------------------------


@cache
def _tests(kind: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite divides by zero on purpose
        tests = load_model_tests(kind="real" if kind == "light" else kind)
    return {test.name: test for test in sorted(tests, key=lambda test: test.name)}


@cache
def _quick_tests(kind: str) -> dict[str, Any]:
    """Return the tests of a kind without those of `SLOW_TO_MAKE`, which are not made for them."""
    if kind != "node" or (Path(DATA_DIR) / kind).is_dir():  # onnx up to 1.22 has all as files
        return _tests(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(node_cases.__path__):
            if module.name not in SLOW_TO_MAKE:
                import_module(f"{node_cases.__name__}.{module.name}")
    return {test.name: test for test in sorted(node_cases._NodeTestCases, key=lambda test: test.name)}


def names(kind: str, quick: bool = False) -> list[str]:
    """Return the names of all cases of a kind, sorted; those that are `quick` to make, if asked for."""
    return list(_quick_tests(kind) if quick else _tests(kind))


def sample_cases(hard: int, other: int, quick: bool = False) -> list[tuple[str, str]]:
    """Return kind and name of one in `hard` of the cases of `HARD`, and of one in `other` of the others.

    They are the same every time. Those of a `quick` sample are soon made.
    """
    chosen = []
    for kind in ("node", "simple", "pytorch-converted", "pytorch-operator"):
        for name in names(kind, quick):
            is_hard = any(part in name.lower() for part in HARD)
            if zlib.crc32(name.encode()) % (hard if is_hard else other) == 0:
                chosen.append((kind, name))
    return chosen


def case(kind: str, name: str) -> Case | None:
    """Return a case; None if it would have to be downloaded."""
    test = _quick_tests(kind).get(name) or _tests(kind)[name]
    if kind == "light":
        return _light_case(name, test)
    if test.data_sets is not None:  # made on import; onnx up to 1.22 has all as files
        data = [([_loaded(item) for item in given], [_loaded(item) for item in made]) for given, made in test.data_sets]
        return Case(name, kind, test.model, data, test.rtol, test.atol)
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    data = [
        (list(_saved(data_set, "input", model.graph.input)), list(_saved(data_set, "output", model.graph.output)))
        for data_set in sorted(folder.glob("test_data_set*"))
    ]
    return Case(name, kind, model, data, test.rtol, test.atol)


def _light_case(name: str, test: Any) -> Case | None:
    """Return a model whose weights are made by its own nodes, with the input that the suite's runner gives it."""
    path = Path(onnx.__file__).parent.parent / (test.url or "")
    expected = path.with_name(f"{path.stem}_output_0.pb")
    if not path.is_file() or not expected.is_file():
        return None
    model = onnx.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    given = [Runner.generate_dummy_data(value) for value in model.graph.input if value.name not in weights]
    return Case(name, "light", model, [(given, [_tensor(expected)])], test.rtol, test.atol)


def _loaded(item: Any) -> Any:
    return numpy_helper.to_array(item) if isinstance(item, TensorProto) else item


def _saved(folder: Path, what: str, values: Sequence[ValueInfoProto]) -> Iterator[Any]:
    for index in range(len(list(folder.glob(f"{what}_*.pb")))):
        yield _read(folder / f"{what}_{index}.pb", values[index].type)


def _read(file: Path, kind: TypeProto) -> Any:
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(file.read_bytes()))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(file.read_bytes()))
    return _tensor(file)


def _tensor(file: Path) -> Any:
    return numpy_helper.to_array(TensorProto.FromString(file.read_bytes()))


# --- forced placements --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forced:
    """A way to place any model."""

    name: str
    devices: int
    passes: str
    """What comes before the placer, as pipeline text."""
    placer: Pass | str
    surrounded: bool = False
    device_ids: tuple[str, ...] = ()
    """By default cpu:0, cpu:1 and so on."""


def placements(seed: int) -> list[Forced]:
    """Return the placements that each case goes through; `seed` draws the random ones."""
    random = np.random.default_rng(seed)
    found = []
    for count in (2, 3):
        turns = RandomPlacement(tuple(range(count)))
        chosen, delays = random.integers(0, count, 16).tolist(), random.integers(0, 9, 16).tolist()
        drawn = RandomPlacement(tuple(chosen), tuple(delays))
        found += [
            Forced(f"round robin, {count} devices", count, _ESTIMATED, turns),
            Forced(f"random, {count} devices, seed {seed}", count, f"optimize,{_ESTIMATED}", drawn),
            Forced(f"m-etf, {count} devices", count, f"optimize,{_ESTIMATED},coplace,fuse", "m-etf"),
            Forced(f"round robin, {count} devices, surrounded", count, _ESTIMATED, turns, surrounded=True),
        ]
    return found


def placements_on(*device_ids: str) -> list[Forced]:
    """Return two placements that give the nodes to these devices in turn."""
    count = len(device_ids)
    turns = RandomPlacement(tuple(range(count)))
    name = f"round robin, {', '.join(device_ids)}"
    return [
        Forced(name, count, _ESTIMATED, turns, device_ids=device_ids),
        Forced(f"{name}, surrounded", count, _ESTIMATED, turns, surrounded=True, device_ids=device_ids),
    ]


_ESTIMATED = "profile{estimate=true}"


def surrounded(model: ModelProto) -> ModelProto | None:
    """Return the model with an Identity between it and each of its inputs and outputs; None if there is no room.

    The caller's names stay.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    kinds = [value.type for value in (*model.graph.input, *model.graph.output)]
    lowest = 16 if any(kind.HasField("optional_type") for kind in kinds) else 14
    if all(kind.HasField("tensor_type") for kind in kinds):
        lowest = 1
    weights = {tensor.name for tensor in model.graph.initializer}
    if versions.get("", versions.get("ai.onnx", 0)) < lowest or not model.graph.node:
        return None
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    given = {value.name: f"{value.name}/in" for value in graph.input if value.name not in weights}
    made = {value.name: f"{value.name}/out" for value in graph.output}
    if any(name in given or name in weights for name in made):
        return None
    before = [helper.make_node("Identity", [name], [inner]) for name, inner in given.items()]
    after = [helper.make_node("Identity", [inner], [name]) for name, inner in made.items()]
    for node in graph.node:
        rename_reads(node, {**given, **made})
        node.output[:] = [made.get(name, name) for name in node.output]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


# --- running ------------------------------------------------------------------------------------------------------


def outcome(kind: str, name: str, forced: Sequence[Forced] = (), plain_device: str = "cpu:0") -> Outcome:
    """Return what becomes of a case: in plain ONNX Runtime first, on `plain_device`, then in every placement.

    The placements are `forced`, by default `placements` of the case's name.
    """
    return judge(kind, name, lambda found: failures(found, forced, plain_device), plain_device)


def judge(kind: str, name: str, check: Callable[[Case], Iterator[str]], plain_device: str = "cpu:0") -> Outcome:
    """Return what becomes of a case: in plain ONNX Runtime first, then in `check`, which yields what goes wrong."""
    found = case(kind, name)
    if found is None:
        return Outcome(name, kind, "not available", "its model would have to be downloaded")
    try:
        plain = PlainSession(found.model, device_id=plain_device)
        results = [plain.run(given) for given, _ in found.data_sets]
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return Outcome(name, kind, "refused by ONNX Runtime", first_line(problem))
    try:
        for (_, expected), made in zip(found.data_sets, results):
            require_similar(expected, made, found)
    except Exception as problem:  # noqa: BLE001 - a comparison that is impossible is no success
        return Outcome(name, kind, "other results in ONNX Runtime", first_line(problem))
    if not (wrong := list(check(found))):
        return Outcome(name, kind, "passed")
    # Within one session, ONNX Runtime drops the rounding between two float16 nodes on a CPU; across a cut it cannot.
    coarse = any(getattr(item, "dtype", None) == np.float16 for _, expected in found.data_sets for item in expected)
    if coarse and not list(check(replace(found, rtol=max(found.rtol, FLOAT16_RTOL)))):
        return Outcome(name, kind, "passed to float16's precision", wrong[0])
    return Outcome(name, kind, "failed", "; ".join(wrong))


def failures(found: Case, forced_placements: Sequence[Forced] = (), plain_device: str = "cpu:0") -> Iterator[str]:
    """Yield what goes wrong in each placement that does not pass."""
    around = surrounded(found.model)
    if around is not None and not _plain_passes(found, around, plain_device):
        around = None
    for forced in forced_placements or placements(zlib.crc32(found.name.encode())):
        model = around if forced.surrounded else found.model
        if model is None:
            continue
        try:
            run_placed(found, model, forced)
        except Exception as problem:  # noqa: BLE001 - whatever it is, it counts
            yield f"{forced.name}: {first_line(problem)}"


def _plain_passes(found: Case, model: ModelProto, device_id: str) -> bool:
    """Return whether ONNX Runtime passes, with and without leave to remove the nodes that were added."""
    try:
        for plain in (PlainSession(model, True, device_id), PlainSession(model, False, device_id)):
            for given, expected in found.data_sets:
                require_similar(expected, plain.run(given), found)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return False
    return True


def run_placed(found: Case, model: ModelProto, forced: Forced) -> None:
    """Compile a model with a forced placement, run all its data; raises AssertionError if a result is another one."""
    from onnxplace.pipeline.pipeline import Pipeline

    ids = forced.device_ids or tuple(f"cpu:{index}" for index in range(forced.devices))
    devices = tuple(Device(device_id, 1 << 34) for device_id in ids)
    placer = Pipeline.parse(forced.placer).passes if isinstance(forced.placer, str) else (forced.placer,)
    steps = (*Pipeline.parse(forced.passes).passes, *placer, *Pipeline.parse("split,emit").passes)
    with tempfile.TemporaryDirectory(prefix="onnxplace-") as folder:
        fed = [dict(zip(fed_names(model), given)) for given, _ in found.data_sets]
        compiled = compile_model(
            model, Path(folder) / "bundle", target=Target(devices), inputs=fed[0], pipeline=Pipeline(steps)
        )
        with onnxplace.InferenceSession(compiled.bundle) as session:
            for feeds, (_, expected) in zip(fed, found.data_sets):
                before = _bits(feeds)
                result = session.submit(feeds).result(timeout=HUNG_SECONDS)
                require_similar(expected, [result.outputs[item.name] for item in session.get_outputs()], found)
                if _bits(feeds) != before:
                    raise AssertionError("the caller's inputs were altered")


def compile_on_two_devices(found: Case, feeds: Mapping[str, Any], path: Path) -> onnxplace.Bundle:
    """Return the bundle of a case whose nodes are on two devices in random order."""
    from onnxplace.pipeline.pipeline import Pipeline

    chosen = np.random.default_rng(zlib.crc32(found.name.encode())).integers(0, 2, 16).tolist()
    steps = [Pipeline.parse(text).passes for text in ("profile{estimate=true}", "split,emit")]
    pipeline = Pipeline((*steps[0], RandomPlacement(tuple(chosen)), *steps[1]))
    target = Target((Device("cpu:0", 1 << 34), Device("cpu:1", 1 << 34)))
    return compile_model(found.model, path, target=target, inputs=dict(feeds), pipeline=pipeline).bundle


def _bits(value: Any) -> Any:
    """Return fed values in a form that is equal if their bits are, NaN or not."""
    if isinstance(value, dict):
        return {name: _bits(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_bits(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype == object else value.tobytes()
    return value


def require_similar(expected: Sequence[Any], made: Sequence[Any], found: Case) -> None:
    """Raise AssertionError unless outputs are equal within the suite's tolerance for this case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # infinities and NaN are compared as the suite compares them
        Runner.assert_similar_outputs(_flat(expected), _flat(made), found.rtol, found.atol)


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return outputs with sequences as their length and elements, which the suite cannot compare if one is a scalar."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, list):
            flat += [np.array(len(value)), *_flat(value)]
        else:  # None is an absent optional, and equal to nothing else
            flat.append(np.array("absent", dtype=object) if value is None else value)
    return flat


def fed_names(model: ModelProto) -> list[str]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in weights]


class PlainSession:
    """A model in ONNX Runtime, without us, but for its IR version, which is lowered to the latest one it takes."""

    def __init__(self, model: ModelProto, optimized: bool = True, device_id: str = "cpu:0") -> None:
        address = DeviceAddress.of(device_id)
        kind = find_kind(address.kind)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        for key, value in kind.session_entries(address).items():
            options.add_session_config_entry(key, value)
        data = _with_ir(model, min(model.ir_version, MAX_IR_VERSION)).SerializeToString()
        self._session = kind.create_session(data, options, address, {})

    @property
    def input_types(self) -> dict[str, str]:
        """Return the types of the inputs, by name."""
        return {item.name: item.type for item in self._session.get_inputs()}

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Return the outputs; through OrtValues where numpy has no form for a value."""
        inputs = self._session.get_inputs()
        given = deepcopy(given)  # unoptimised, it writes the result of a BatchNormalization into an input
        feeds = {item.name: value for item, value in zip(inputs, given)}
        try:
            return list(self._session.run(None, feeds))
        except Exception:  # noqa: BLE001 - bfloat16 and its like: "no corresponding Numpy type"
            values = {
                item.name: to_ort_value(value, item.type) for item, value in zip(inputs, given) if value is not None
            }
            names = [item.name for item in self._session.get_outputs()]
            return [to_python(value) for value in self._session.run_with_ort_values(names, values)]


def _with_ir(model: ModelProto, version: int) -> ModelProto:
    if model.ir_version == version:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    result.ir_version = version
    return result


def first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {' '.join(lines[:4])[:300]}"


__all__ = [
    "KINDS",
    "STATUSES",
    "Case",
    "Forced",
    "Outcome",
    "PlainSession",
    "case",
    "compile_on_two_devices",
    "failures",
    "fed_names",
    "first_line",
    "judge",
    "names",
    "outcome",
    "placements",
    "placements_on",
    "require_similar",
    "sample_cases",
    "surrounded",
]
