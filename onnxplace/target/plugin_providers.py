"""Devices of execution providers that come as their own packages, beside one plain onnxruntime, or built into it.

A kind of such devices is called after the package and the hardware: `qnn/npu`, `openvino/gpu`. Packages are found, not
listed: any that is called `onnxruntime_ep_NAME` and has `get_library_path`, and any library that the environment
variable ONNXPLACE_PROVIDER_LIBRARIES names. A record says what is special about a provider; most need none.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from typing import Any, ClassVar

from onnxplace.errors import OnnxplaceError, UsageError, format_one_line
from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware, list_provider_options
from onnxplace.target.provider_lock import ProviderLock
from onnxplace.target.webgpu import WEBGPU_LOCK
from onnxplace.utils.control_groups import count_free_bytes
from onnxplace.utils.ort import import_onnxruntime
from onnxplace.utils.subprocesses import run_in_child

# name=path of libraries, separated as in PATH.
LIBRARIES_VARIABLE = "ONNXPLACE_PROVIDER_LIBRARIES"
_NAME = re.compile(r"[a-z][a-z0-9-]*")
TYPES = ("npu", "gpu", "igpu", "cpu")
_TITLES = {"npu": "NPU", "gpu": "GPU", "igpu": "integrated GPU", "cpu": "processor"}


@dataclass(frozen=True)
class ProviderRecord:
    """What is known of an execution provider; the defaults hold for one that nobody has heard of."""

    vendor: str = ""
    package: str = ""
    """What pip installs, by default `onnxruntime-ep-NAME`; the build of ONNX Runtime that contains it, as text."""
    built_in: str = ""
    """The name of the provider in builds of ONNX Runtime that contain it."""
    types: Sequence[str] = ()
    """Of its devices: assumed while nothing can be asked, and those of a provider that is built in."""
    needs_static_shapes: bool = False
    compiles: bool = True
    """Whether it makes one kernel of neighbouring nodes."""
    computes_in: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By type of device, the types that float32 can be computed in, the default first; float32 where none is named."""
    sets_options: Callable[[str, str, int], Mapping[str, str]] | None = None
    """Returns the provider's options for a type of device, the type that float32 is computed in, and a number of
    threads, which is 0 for devices without cores."""
    isolates_on_cores: bool = False
    """Whether sessions of one process disturb each other that have several threads each, on a part of the cores."""
    caches_contexts: bool = False
    """Whether it writes compiled models (EPContext nodes)."""
    lock: ProviderLock | None = None
    """Of a provider that is not safe for threads."""
    is_tried_in_child: bool = False
    """Whether its library is loaded in its own process first, in case that ends the process."""
    is_hurt_by_failures: bool = False
    """Whether a session is of no use after a run that failed."""


_ON_FLOAT16 = {"npu": ("float16",), "gpu": ("float16",), "igpu": ("float16",)}


def _set_openvino(kind: str, precision: str, threads: int) -> Mapping[str, str]:
    """Return options of OpenVINO, which by itself computes float32 in the fastest type of the hardware."""
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    entries = {} if kind == "npu" else {"INFERENCE_PRECISION_HINT": names[precision]}
    if threads:
        entries["INFERENCE_NUM_THREADS"] = str(threads)
    if threads == 1:
        # It computes in the caller's thread. With a thread of its own, errors of sizes are lost and old values are
        # returned, and the sessions of a process wait for each other.
        entries["NUM_STREAMS"] = "0"
    return {"load_config": json.dumps({kind.removeprefix("i").upper(): entries})} if entries else {}


RECORDS = {
    "qnn": ProviderRecord(
        "Qualcomm",
        "onnxruntime-qnn",
        types=("npu",),
        needs_static_shapes=True,
        computes_in=_ON_FLOAT16,
        caches_contexts=True,
    ),
    "openvino": ProviderRecord(
        "Intel",
        types=("npu", "gpu", "cpu"),
        computes_in={
            "npu": ("float16",),
            "gpu": ("float32", "float16"),
            "igpu": ("float32", "float16"),
            "cpu": ("float32", "bfloat16"),
        },
        sets_options=_set_openvino,
        # Its runs pin the calling thread to a core that it chooses: two at once take twice as long, on one core
        # (benchmarks/provider_cores.py).
        isolates_on_cores=True,
        caches_contexts=True,
        is_hurt_by_failures=True,
    ),
    "webgpu": ProviderRecord(types=("gpu",), compiles=False, lock=WEBGPU_LOCK),
    "nv-tensorrt-rtx": ProviderRecord("NVIDIA", types=("gpu",), caches_contexts=True),
    "vitisai": ProviderRecord(
        "AMD",
        "onnxruntime-vitisai of AMD's Ryzen AI software",
        "VitisAIExecutionProvider",
        types=("npu",),
        needs_static_shapes=True,
        computes_in={"npu": ("bfloat16",)},
        caches_contexts=True,
    ),
    "directml": ProviderRecord(
        "Microsoft", "onnxruntime-directml for Windows", "DmlExecutionProvider", ("gpu",), compiles=False
    ),
    "coreml": ProviderRecord(
        "Apple", "onnxruntime for macOS", "CoreMLExecutionProvider", ("npu",), computes_in=_ON_FLOAT16
    ),
    "migraphx": ProviderRecord(
        "AMD",
        "onnxruntime-migraphx for Linux with ROCm",
        "MIGraphXExecutionProvider",
        ("gpu",),
        computes_in={"gpu": ("float32", "float16")},
        sets_options=lambda _, precision, threads: {"migraphx_fp16_enable": str(int(precision == "float16"))},
    ),
}
_UNKNOWN = ProviderRecord(types=("npu",), is_tried_in_child=True)


def find_record(family: str) -> ProviderRecord:
    """Return what is known of a provider, by the first part of the names of its kinds."""
    return RECORDS.get(family, _UNKNOWN)


def list_families() -> tuple[str, ...]:
    """Return the providers whose packages or libraries are installed, or that this ONNX Runtime has built in."""
    packages = [item.name for item in pkgutil.iter_modules() if item.name.startswith("onnxruntime_ep_")]
    names = [*RECORDS, *_list_named(), *(name.removeprefix("onnxruntime_ep_").replace("_", "-") for name in packages)]
    return tuple(name for name in dict.fromkeys(names) if has_family(name))


def has_library(family: str) -> bool:
    """Return whether a provider comes as its own library."""
    return bool(family in _list_named() or _find_module(family))


@cache
def has_family(family: str) -> bool:
    """Return whether a provider is installed, without loading it."""
    return has_library(family) or _is_built_in(family)


def _list_named() -> dict[str, str]:
    """Return the libraries that the user names, by provider; raises UsageError for other text."""
    libraries = {}
    for item in filter(None, os.environ.get(LIBRARIES_VARIABLE, "").split(os.pathsep)):
        name, _, path = item.partition("=")
        if not path or not _NAME.fullmatch(name):
            message = f"expected NAME=PATH with a name of lower-case letters, digits and hyphens, got {item!r}"
            raise UsageError("U005", message, where=LIBRARIES_VARIABLE, hint="as in mynpu=/opt/mynpu/libmynpu.so")
        libraries[name] = path
    return libraries


def _find_module(family: str) -> str | None:
    if not _NAME.fullmatch(family):
        return None
    module = _package(family).replace("-", "_")
    return module if importlib.util.find_spec(module) else None


def _is_built_in(family: str) -> bool:
    name = find_record(family).built_in
    return bool(name) and name in import_onnxruntime().get_available_providers()


@dataclass(frozen=True)
class LoadedProvider:
    """A provider's devices by type, or why there are none."""

    devices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """ONNX Runtime's OrtEpDevice objects."""
    problem: str = ""
    version: str = ""
    """That of the package, or what the library says of itself."""
    is_simulator: bool = False


_loading = threading.Lock()
_loaded: dict[str, LoadedProvider] = {}


def load_provider(family: str) -> LoadedProvider:
    """Register a provider's library with ONNX Runtime, once in a process, and return its devices."""
    with _loading:
        if family not in _loaded:
            _loaded[family] = _load(family)
        return _loaded[family]


def _load(family: str) -> LoadedProvider:
    path = named = _list_named().get(family, "")
    if not named:
        if (name := _find_module(family)) is None:
            return LoadedProvider(problem=f"{find_record(family).built_in or _package(family)} is not installed")
        try:
            path = str(importlib.import_module(name).get_library_path())
        except Exception as problem:  # noqa: BLE001 - a package may fail in any way; the text names it
            return LoadedProvider(problem=f"its package {name} cannot be used: {format_one_line(problem)}")
    if not os.path.isfile(path):
        return LoadedProvider(problem=f"its library {path} does not exist")
    try:
        if named or find_record(family).is_tried_in_child:
            run_in_child(_try_library, (family, path), f"loading its library {path}", family)
        found = _register(family, path)
    except OnnxplaceError as problem:
        return LoadedProvider(problem=problem.message)
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return LoadedProvider(problem=f"ONNX Runtime cannot load its library {path}: {_strip_codes(problem)}")
    by_type: dict[str, list[Any]] = {}
    is_simulator = False
    for device in found:
        name = _find_type(device)
        if name == "cpu" and family == "qnn":  # its library of x86-64 simulates the NPU
            name, is_simulator = "npu", True
        by_type.setdefault(name, []).append(device)
    nothing = "" if found else f"{_package(family)} finds no device of its own on this machine"
    return LoadedProvider(by_type, nothing, _find_version(family, found), is_simulator)


def _strip_codes(problem: Exception) -> str:
    """Return ONNX Runtime's message without what precedes it: places in sources, numbers and names of errors."""
    return re.sub(r".*\[ONNXRuntimeError\] : \d+ : \w+ : |Exception from \S+:\d+: ", "", format_one_line(problem))


def _find_version(family: str, devices: Sequence[Any]) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(_package(family))
    return str(dict(devices[0].ep_metadata).get("version", "")) if devices else ""


def _package(family: str) -> str:
    """Return the package that brings a provider as a library, or the library that the user names."""
    usual = "" if find_record(family).built_in else find_record(family).package
    return _list_named().get(family) or usual or f"onnxruntime-ep-{family}"


def _try_library(job: tuple[str, str]) -> None:
    """Register a library, in a process that it may end; a refusal is repeated where it is registered for good."""
    with contextlib.suppress(Exception):
        _register(*job)


def _register(family: str, path: str) -> list[Any]:
    """Register a library; return the devices that are new."""
    runtime = import_onnxruntime()
    known = {device.ep_name for device in runtime.get_ep_devices()}
    with _keep_stdout():
        runtime.register_execution_provider_library(family, path)
        new = [device for device in runtime.get_ep_devices() if device.ep_name not in known]
    # OpenVINO lists its choice among its devices as one more.
    return [device for device in new if "ov_meta_device" not in device.ep_metadata]


def _find_type(device: Any) -> str:
    kind = str(device.device.type).rpartition(".")[2].lower()
    is_integrated = dict(device.device.metadata).get("Discrete", "1") == "0"
    return "igpu" if kind == "gpu" and is_integrated else kind


_greeted: set[str] = set()


@contextlib.contextmanager
def _hold_greeting(family: str) -> Iterator[None]:
    """Keep what the first session of a provider in this process prints from stdout: QNN's simulator greets there."""
    if family in _greeted:
        yield
        return
    with _loading, _keep_stdout():
        yield
        _greeted.add(family)


@contextlib.contextmanager
def _keep_stdout() -> Iterator[None]:
    """Send what native code prints to stdout to stderr meanwhile; `_loading` must be held: all threads share stdout.

    Commands do so until they end (`keep_stdout`); programs that use this package keep their stdout.
    """
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


class _RenewedSession:
    """A session of ONNX Runtime that is opened anew after a run that failed.

    After inputs whose sizes do not fit, OpenVINO's fails with all others of the sizes that it had before.
    """

    def __init__(self, open_session: Callable[[], Any]) -> None:
        self._open, self._session = open_session, open_session()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._session, name)
        return partial(self._run, attribute) if name.startswith("run") else attribute

    def _run(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return run(*arguments, **options)
        except Exception:
            with contextlib.suppress(Exception):  # its files may be gone
                self._session = self._open()
            raise


class ProviderKind(DeviceKind):
    """Devices of one type of one provider; subclasses are made by `make_provider_kind`.

    Values lie in the host's memory: sessions copy them where a device has its own.
    """

    family: ClassVar[str]
    type: ClassVar[str]
    memory: ClassVar[str] = "onnxplace.runtimes.execution.host_memory:HostMemory"

    def list_hardware(self) -> tuple[Hardware, ...]:
        """Return the provider's devices of this type; one that cannot be used where the provider has a problem."""
        import psutil

        memory, loaded, devices = psutil.virtual_memory(), load_provider(self.family), self._devices
        count = 1 if self._is_built_in or not loaded.devices or self.has_cores else len(devices)
        return tuple(
            Hardware(
                index=index,
                name=self.describe(index),
                memory_bytes=int(memory.total),
                free_bytes=count_free_bytes(),
                memory_is_known=False,
                vendor=str(devices[index].ep_vendor) if devices else find_record(self.family).vendor,
                package="" if self._is_built_in else _package(self.family),
                version=loaded.version,
            )
            for index in range(count)
        )

    @property
    def _devices(self) -> Sequence[Any]:
        return load_provider(self.family).devices.get(self.type, ())

    def _number(self, address: DeviceAddress) -> int:
        """Return which of the provider's devices it is; all processors are the first."""
        return 0 if self.has_cores else address.index

    @property
    def _is_built_in(self) -> bool:
        return not has_library(self.family) and _is_built_in(self.family)

    def describe(self, index: int) -> str:
        """Return a human-readable text: vendor, type and version of a device."""
        index = 0 if self.has_cores else index
        if index >= len(self._devices):
            return self.title
        device = self._devices[index]
        said = dict(device.device.metadata).get("Description") or dict(device.ep_metadata).get("FULL_DEVICE_NAME")
        name = said or f"{device.ep_vendor} {_TITLES[self.type]}"
        return name + (", simulated on the processor" if load_provider(self.family).is_simulator else "")

    def find_problem(self, address: DeviceAddress) -> str | None:
        """Return why ONNX Runtime cannot use a device: no library, no such device, or it takes no node."""
        if not self.family:
            return f"ONNX Runtime has no {_TITLES[self.type]} here that it can use"
        if not self._is_built_in:
            loaded = load_provider(self.family)
            if loaded.problem:
                return loaded.problem
            if self._number(address) >= len(self._devices):
                offered = [
                    f"{self.family}/{name}:{i}" for name, items in loaded.devices.items() for i in range(len(items))
                ]
                return f"{_package(self.family)} offers {', '.join(offered)} on this machine"
            if self.family == "webgpu" and address.index:
                return "its sessions run on the first adapter whatever they are told (onnxruntime #32561)"
        problems = (self._probe(address, name) for name in PROBES)
        first = next(problems)
        return first if first and all(problems) else None  # no graph after the first that is taken is tried

    def list_taken(self, address: DeviceAddress) -> list[str]:
        """Return the names of those graphs of `PROBES` that a usable device takes, at least in part."""
        return [name for name in PROBES if self._probe(address, name) is None]

    def _probe(self, address: DeviceAddress, name: str) -> str | None:
        return _probe(self, address.index, tuple(sorted(address.options.items())), name)

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        """Return the provider with its options."""
        return [(self.provider(address.options), self._provider_options(address))]

    def create_session(
        self, model: str | bytes, options: Any, address: DeviceAddress, provider_options: Mapping[str, str]
    ) -> Any:
        """Return ONNX Runtime's session on the device that its provider listed."""
        if self._is_built_in:
            return super().create_session(model, options, address, provider_options)
        more = {**self._list_options(address), **provider_options}
        options.add_provider_for_devices([self._devices[self._number(address)]], more)

        def open_here() -> Any:
            with _hold_greeting(self.family):
                return import_onnxruntime().InferenceSession(model, options, enable_fallback=0)

        return _RenewedSession(open_here) if find_record(self.family).is_hurt_by_failures else open_here()

    def provider(self, options: Mapping[str, str]) -> str:
        """Return the name that ONNX Runtime has for the provider."""
        if self._is_built_in:
            return find_record(self.family).built_in
        return str(self._devices[0].ep_name) if self._devices else self.family

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return the path of the provider's library."""
        found = [item for items in load_provider(self.family).devices.values() for item in items]
        return tuple(dict.fromkeys(dict(item.ep_metadata).get("library_path", "") for item in found))

    def precision(self, address: DeviceAddress) -> str:
        """Return the type in which it computes float32."""
        # QNN's simulator adds and multiplies in float32, but Softmax and normalisation have errors of float16.
        usual = find_record(self.family).computes_in.get(self.type, ("float32",))[0]
        return address.options.get("precision", usual)

    def describe_compiler(self, address: DeviceAddress) -> str:
        """Return provider, hardware, ONNX Runtime, precision and options, if the provider writes compiled models."""
        if self._is_built_in or not find_record(self.family).caches_contexts:
            return ""
        version, hardware = load_provider(self.family).version, self._devices[self._number(address)].device
        options = {"precision": self.precision(address), **self._list_options(address)}
        software = f"{self.family} {version}, onnxruntime {import_onnxruntime().__version__}"
        device = f"{self.describe(address.index)} ({hardware.vendor_id:x}:{hardware.device_id:x})"
        return ", ".join([software, device, *(f"{key}={value}" for key, value in options.items())])

    def _list_options(self, address: DeviceAddress) -> dict[str, str]:
        """Return our options with those that are given; of JSON such as OpenVINO's `load_config`, entry by entry."""
        own, given = self._provider_options(address), list_provider_options(address.options)
        for name in own.keys() & given.keys():
            with contextlib.suppress(ValueError, AttributeError, TypeError):  # the provider says what is wrong with it
                ours, theirs = json.loads(own[name]), json.loads(given[name])
                both = {key: {**ours[key], **theirs[key]} for key in ours.keys() & theirs.keys()}
                given[name] = json.dumps({**ours, **theirs, **both})
        return {**own, **given}

    def _provider_options(self, address: DeviceAddress) -> dict[str, str]:
        options = {"device_id": str(address.index)} if self._is_built_in and self.type == "gpu" else {}
        if (sets_options := find_record(self.family).sets_options) is not None:
            return {**options, **sets_options(self.type, self.precision(address), address.cores)}
        if self.family != "qnn":
            return options
        options = {"backend_type": "htp" if self.type == "npu" else "gpu"}  # a library next to the provider's own
        if load_provider(self.family).is_simulator and address.options.get("precision") == "float16":
            options["soc_model"] = "60"  # a chip that computes in float16; the simulator's own computes in float32
        return options

    def shares_memory(self, index: int) -> bool:
        """Return whether the provider names no memory of a device, or the device is part of the processor."""
        own = import_onnxruntime().OrtDeviceMemoryType.DEFAULT
        return (
            self.type == "igpu"
            or self.has_cores
            or any(item.memory_info(own) is None for item in self._devices[index : index + 1])
        )

    def find_link(self, first: int, second: int) -> str:
        """Return `memory`: values of two devices of one provider lie in the host's memory."""
        return "memory"


def parse_kind_name(name: str) -> tuple[str, str] | None:
    """Return provider and type of the name of a kind such as `qnn/npu`, if the provider is known or installed.

    >>> parse_kind_name("qnn/npu")
    ('qnn', 'npu')
    """
    family, slash, kind = name.partition("/")
    if not slash or kind not in TYPES or not (family in RECORDS or has_family(family)):
        return None
    return family, kind


def list_provider_kinds() -> tuple[str, ...]:
    """Return the kinds of the providers that are installed; one for a provider without devices, which says why."""
    names = []
    for family in list_families():
        types = list(load_provider(family).devices) if has_library(family) else []
        names += [f"{family}/{kind}" for kind in types or find_record(family).types[:1]]
    return tuple(names)


# Deliberately round: operations and bytes per second, seconds of an operator, latency and rate of a link.
_RATES = {
    "npu": (5e12, 50e9, 20e-6, 100e-6, 5e9),
    "gpu": (5e12, 200e9, 10e-6, 50e-6, 8e9),
    "igpu": (1e12, 50e9, 20e-6, 50e-6, 10e9),
    "cpu": (40e9, 8e9, 5e-6, 45e-6, 10e9),
}


@cache
def make_provider_kind(name: str) -> DeviceKind:
    """Return the kind of devices of a name that `parse_kind_name` accepts, or of a type alone, which has none here."""
    family, kind = parse_kind_name(name) or ("", name)
    record, rates = find_record(family), _RATES[kind]
    hint = f"pip install {_package(family)}" if family else ""
    if record.built_in:
        hint = f"it is in the wheel {record.package}, which has to be the only wheel of ONNX Runtime"
    precisions = tuple(record.computes_in.get(kind, ())) if family != "qnn" else ("float32", "float16")
    fields: dict[str, Any] = {
        "name": name,
        "title": f"{record.vendor} {_TITLES[kind]}".strip() + f" by {family}" * bool(family),
        "family": family,
        "type": kind,
        "providers": {family: record.built_in or family},
        "lock": record.lock,
        **({"memory": "onnxplace.runtimes.execution.bound_memory:BoundMemory"} if record.lock else {}),
        "needs_static_shapes": record.needs_static_shapes,
        "has_cores": kind == "cpu",
        "isolates_on_cores": record.isolates_on_cores and kind == "cpu",
        "compiles": record.compiles,
        "value_options": {
            **({"precision": precisions} if len(precisions) > 1 else {}),
            **({"fallback": ("false", "true")} if record.compiles else {}),
        },
        "operations_per_second": rates[0],
        "memory_bytes_per_second": rates[1],
        "kernel_seconds": rates[2],
        "link_latency_seconds": rates[3],
        "link_bytes_per_second": rates[4],
        "install_hint": "" if has_family(family) else hint,
    }
    made: DeviceKind = type("ProviderKind", (ProviderKind,), fields)()
    return made


_WEIGHTS = ", ".join(["0.25"] * 64)
# What providers are tried with, apart: some refuse a whole graph for one of its nodes, or take no single node.
PROBES = {
    "elementwise operators": "(float[1, 8] x) => (float[1, 8] y) { y = Relu(x) }",
    "matrix products": f"""(float[1, 8] x) => (float[1, 8] y) <float[8, 8] w = {{{_WEIGHTS}}}> {{
        a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Relu(c) e = MatMul(d, w) y = Relu(e) }}""",
    "convolutions": f"""(float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) <float[8, 8, 1, 1] w = {{{_WEIGHTS}}}> {{
        a = Conv(x, w) b = Relu(a) c = Conv(b, w) d = Relu(c) e = Conv(d, w) y = Relu(e) }}""",
    "quantised operators": """(float[1, 8] x) => (float[1, 8] z) <float[1] scale = {0.5}, uint8[1] zero = {128}> {
        a = QuantizeLinear(x, scale, zero) b = DequantizeLinear(a, scale, zero) c = Relu(b)
        d = QuantizeLinear(c, scale, zero) z = DequantizeLinear(d, scale, zero) }""",
    "float16": "(float16[1, 8] x) => (float16[1, 8] y) { y = Relu(x) }",
}


@cache
def _probe(kind: ProviderKind, index: int, options: tuple[tuple[str, str], ...], name: str) -> str | None:
    """Return why a device computes none of a graph of `PROBES`; a missing backend leaves all to the CPU, no error."""
    from onnx import parser

    runtime, address = import_onnxruntime(), DeviceAddress(kind.name, index, options=dict(options))
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> probe {PROBES[name]}').SerializeToString()
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")

    def list_providers() -> set[str]:
        session = kind.create_session(model, settings, address, {})
        return {item.ep_name for item in session.get_provider_graph_assignment_info()}

    try:
        taken = kind.lock.call(list_providers) if kind.lock else list_providers()
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        return f"ONNX Runtime cannot open it: {_strip_codes(problem)}"
    if kind.provider(address.options) not in taken:
        return "it opens, but leaves every node to the CPU: its driver or backend is missing"
    return None
