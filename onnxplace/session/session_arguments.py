"""The arguments of `onnxruntime.InferenceSession`: what of them counts for a bundle, and what is ignored."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.errors import BundleError, OnnxplaceError, format_names, format_value, suggest_nearest
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.session.exceptions import argument_error, match_onnxruntime
from onnxplace.target.kind_table import find_kind
from onnxplace.utils.ort import import_onnxruntime

IGNORED_CODE = "U087"
_NOTE = f"note[{IGNORED_CODE}]:"
CPU_PROVIDER = "CPUExecutionProvider"
# Keywords that ONNX Runtime takes beyond its signature. It never matters here that it would fall back.
FURTHER = ("enable_fallback", "disabled_optimizers", "read_config_from_model")
# Session options that have an effect here.
_HONOURED = ("enable_profiling", "profile_file_prefix")
# Session options that say what is logged: a result never depends on them.
_LOGGING = ("log_severity_level", "log_verbosity_level", "logid")


@dataclass(frozen=True)
class SessionArguments:
    """Arguments that were written for ONNX Runtime."""

    session_options: Any = None
    profile_prefix: str | None = None
    """Beginning of the path of the trace that `end_profiling` writes; None if the options ask for none."""
    ignored: tuple[str, ...] = ()
    """Arguments without an effect."""


@contextmanager
def open_bundle(path_or_bytes: Any) -> Iterator[Bundle]:
    """Yield the bundle at a path, or a Bundle as it is; what is opened with it may only be used after the block.

    Larger files are hashed during the block: see `Bundle.open_while_hashing`.

    Raises BundleError for the bytes or the file of a model, and UsageError, also a TypeError, for anything else.
    """
    if isinstance(path_or_bytes, Bundle):
        yield path_or_bytes
        return
    if isinstance(path_or_bytes, (bytes, bytearray)):
        message = f"expected the folder of a bundle, got {len(path_or_bytes)} bytes"
        hint = "compile the model first: onnxplace.compile(onnx.load_from_string(data), 'model.bundle')"
        raise BundleError("N001", message, hint=hint)
    if not isinstance(path_or_bytes, (str, os.PathLike)):
        message = f"expected a bundle or the path of one, got {format_value(path_or_bytes)}"
        raise argument_error(TypeError, message, where="path_or_bytes")
    path = Path(os.fspath(path_or_bytes))
    try:
        with Bundle.open_while_hashing(path) as bundle:
            yield bundle
    except BundleError as error:
        match_onnxruntime(error, "" if os.path.exists(path) else "NoSuchFile")
        raise


def accept_arguments(
    bundle: Bundle,
    session_options: Any,
    providers: Sequence[str | tuple[str, dict[Any, Any]]] | None,
    provider_options: Sequence[dict[Any, Any]] | None,
    further: Mapping[str, Any],
    session_type: type,
    more_names: Iterable[str] = (),
) -> SessionArguments:
    """Check arguments that were written for ONNX Runtime; warns once about those that have no effect.

    Raises UsageError, also a TypeError or ValueError as in ONNX Runtime, for arguments of a wrong kind. `session_type`
    has the arguments that may have been meant, besides `more_names`.
    """
    for name in further:
        if name not in FURTHER:
            known = [*inspect.signature(session_type).parameters, *more_names, *FURTHER]
            hint = suggest_nearest(name, known)
            raise argument_error(TypeError, f"there is no argument {name!r}", hint=hint)
    ignored = [f"{name}={format_value(further[name])}" for name in FURTHER[1:] if further.get(name)]
    prefix = None
    if session_options is not None:
        ignored += [*_list_ignored_options(session_options), *_list_given_weights(bundle, session_options)]
        prefix = session_options.profile_file_prefix if session_options.enable_profiling else None
    ignored += _list_ignored_providers(bundle, _normalize_providers(providers, provider_options))
    if providers is None and provider_options:
        ignored.append("provider_options without providers")
    if ignored:
        reason = "`onnxplace compile` chose the devices, threads and optimisations of this bundle"
        # The caller of InferenceSession is three frames up.
        warn_ignored(f"no effect on a bundle: {format_names(ignored, quoted=False)}; {reason}", stacklevel=4)
    return SessionArguments(session_options, prefix, tuple(ignored))


def warn_ignored(message: str, stacklevel: int = 3) -> None:
    """Warn that something that was written for ONNX Runtime has no effect."""
    warnings.warn(f"{_NOTE} {message}", stacklevel=stacklevel)


def list_providers(bundle: Bundle) -> dict[str, dict[str, str]]:
    """Return the execution providers of a bundle's devices with their options, the CPU's last, as ONNX Runtime does.

    Several devices of a provider are one entry, whose `device_id` lists them, as in `0,1`.
    """
    result: dict[str, dict[str, str]] = {}
    target = bundle.target
    for name in list_route_devices(bundle.manifest):
        device = target.devices[target.position(name)]
        for provider, options in find_kind(device.kind).list_providers(device.address):
            entry = result.setdefault(provider, {})
            for key, value in options.items():
                known = entry.get(key, "").split(",") if entry.get(key) else []
                entry[key] = ",".join(dict.fromkeys([*known, str(value)]))
    return {**result, CPU_PROVIDER: {}}


def _list_ignored_options(session_options: Any) -> list[str]:
    """Return the session options that differ from the defaults and have no effect."""
    kind = import_onnxruntime().SessionOptions
    if not isinstance(session_options, kind):
        message = f"expected onnxruntime.SessionOptions, got {format_value(session_options)}"
        raise argument_error(TypeError, message, where="sess_options")
    default = kind()
    names = [name for name in dir(default) if not name.startswith("_") and not callable(getattr(default, name))]
    changed = [
        f"sess_options.{name}"
        for name in names
        if name not in (*_HONOURED, *_LOGGING) and getattr(session_options, name) != getattr(default, name)
    ]
    return [*changed, *(["the providers of sess_options"] if session_options.has_providers() else [])]


def _list_given_weights(bundle: Bundle, session_options: Any) -> list[str]:
    """Return a text if session options hold weights of the bundle's whole model, which would replace its own.

    ONNX Runtime does not let anybody read them: a model that returns empty weights of these names shows them.
    """
    from onnx import helper, load_model

    weights = load_model(bundle.file(WHOLE_MODEL_FILE), load_external_data=False).graph.initializer
    empty = [helper.make_tensor(weight.name, weight.data_type, [0], []) for weight in weights]
    outputs = [helper.make_tensor_value_info(weight.name, weight.data_type, [None]) for weight in weights]
    graph = helper.make_graph([], "weights", [], outputs, empty)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    quiet = {"enable_profiling": False, "optimized_model_filepath": "", "log_severity_level": 4}
    kept = {name: getattr(session_options, name) for name in quiet}
    try:
        for name, value in quiet.items():  # this session prints nothing and leaves no files
            setattr(session_options, name, value)
        session = open_session(model.SerializeToString(), session_options, where="sess_options")
        are_given = any(value.shape() != [0] for value in session.run_with_ort_values(None, {}))
    except OnnxplaceError as problem:
        are_given = "initializer" in problem.message
    finally:
        for name, value in kept.items():
            setattr(session_options, name, value)
    return ["the initializers of sess_options"] if are_given else []


def _normalize_providers(providers: Any, provider_options: Any) -> dict[str, dict[Any, Any]]:
    """Return options by provider; raises UsageError, also a ValueError."""
    if providers is None:
        return {}
    is_list = isinstance(providers, Sequence) and not isinstance(providers, (str, bytes))
    if not is_list:
        problem = f"expected a list such as [{CPU_PROVIDER!r}], got {format_value(providers)}"
    elif provider_options is not None and (
        not isinstance(provider_options, Sequence) or len(provider_options) != len(providers)
    ):
        problem = f"expected as many provider_options as providers, got {format_value(provider_options)}"
    else:
        pairs = [(item, {}) if isinstance(item, str) else item for item in providers]
        if provider_options is not None:
            pairs = list(zip(providers, provider_options))
        if all(_is_pair(pair) for pair in pairs):
            return dict(pairs)
        problem = f"expected names of providers, or pairs of name and options, got {format_value(providers)}"
    raise argument_error(ValueError, problem, where="providers")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], dict)


def _list_ignored_providers(bundle: Bundle, providers: Mapping[str, Mapping[Any, Any]]) -> list[str]:
    """Return the providers and options that contradict the bundle's devices; a superset of its providers does not.

    The first provider is the preferred one, so that it counts if the bundle does not have it.
    """
    if not providers:
        return []
    actual = list_providers(bundle)
    preferred = next(iter(providers))
    missing = [name for name in actual if name not in providers and name != CPU_PROVIDER]
    is_other = preferred not in actual or (preferred == CPU_PROVIDER and len(actual) > 1) or missing
    ignored = [f"providers={list(providers)} (this bundle runs on {', '.join(actual)})"] if is_other else []
    return [*ignored, *(f"provider_options of {name}" for name, options in providers.items() if options)]
