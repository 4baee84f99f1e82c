"""Find passes, runtimes, commands and sources of models by name: a built-in table, and entry points.

Listing imports nothing. A broken plugin fails only on use; the error names its distribution. A plugin cannot take the
name of a built-in one. Parts of this distribution, in `plugins/`, are found by entry points too, and count as built in.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from onnxplace.errors import PluginError, UsageError, suggest_nearest

if TYPE_CHECKING:
    from onnxplace.runtime import Runtime

Kind = Literal["passes", "runtimes", "runtime_options", "commands", "sources"]
OWN_DISTRIBUTION = "onnxplace"
NOUNS: Mapping[Kind, str] = {
    "passes": "pass", "runtimes": "runtime", "runtime_options": "option", "commands": "command", "sources": "source",
}  # fmt: skip

# Class and summary of each built-in pass. The module in `passes/` has the name of the pass.
_PASSES = {
    "optimize": ("Optimize", "fold constants and drop unused nodes"),
    "profile": ("ProfileCosts", "measure what each node costs on each class of device"),
    "limit-errors": ("LimitErrors", "keep nodes off devices on which they are too inexact"),
    "recompute": ("Recompute", "compute values again instead of keeping them in memory"),
    "shard": ("Shard", "split operators over devices"),
    "microbatch": ("Microbatch", "compute the batch of a training step in parts, adding up gradients"),
    "coplace": ("Coplace", "group nodes that must or should share a device"),
    "fuse": ("Fuse", "contract groups into single nodes for the placer"),
    "single": ("Single", "placer: everything on the best single device that fits"),
    "m-topo": ("MTopo", "placer: fill one device after another in topological order"),
    "m-etf": ("MEtf", "placer: place the node that can start earliest, on the device where it can"),
    "m-sct": ("MSct", "placer: like m-etf, except that devices wait for favourite children"),
    "adjust": ("Adjust", "bring groups together again after a placer that ignored them"),
    "multilevel": ("Multilevel", "placer: place a coarse graph, then improve it level by level"),
    "auto": ("Auto", "placer: try them all, search on, keep the best"),
    "refine": ("Refine", "improve a placement by moving regions"),
    "stages": ("Stages", "placer: pipeline stages with the least maximum load, for throughput"),
    "pipelined": ("Pipelined", "placer: layers of a training step on one device each, with micro-batches in turns"),
    "fit": ("Fit", "placer: a placement that fits, with the least traffic"),
    "stream": ("Stream", "placer: hold more than fits, by weights that come in time for each run"),
    "exact": ("Exact", "placer: the best step of a small graph, with a proven gap"),
    "split": ("Split", "cut the placed model into segments and programs"),
    "replicate": ("Replicate", "copy segments to further devices, as routes of requests"),
    "predict": ("Predict", "predict the times and memory that a manifest states, as emit does"),
    "emit": ("Emit", "write the bundle"),
}
# The same for `runtimes/`.
_RUNTIMES = {
    "onnxruntime": ("OnnxRuntime", "run segments with ONNX Runtime, a worker per device"),
    "simulated": ("Simulated", "run nothing; return the predicted timeline"),
}


def _locate(kind: Kind, table: Mapping[str, tuple[str, str]]) -> Mapping[str, tuple[str, str]]:
    """Return `module:attribute` and summary by name."""
    return MappingProxyType(
        {
            name: (f"onnxplace.{kind}.{name.replace('-', '_')}:{attribute}", summary)
            for name, (attribute, summary) in table.items()
        }
    )


BUILTIN: Mapping[Kind, Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"passes": _locate("passes", _PASSES), "runtimes": _locate("runtimes", _RUNTIMES)}
)


# What the plugins of this repository add: an error for a name whose plugin is not installed says how to install it.
OFFERED: Mapping[Kind, Mapping[str, str]] = MappingProxyType(
    {
        "passes": dict.fromkeys(("placeto", "hierarchical", "go", "guided"), "onnxplace-learned"),
        "runtimes": {"mpi": "onnxplace-hosts"},
        "runtime_options": dict.fromkeys(
            ("--hosts", "--replicas", "--start-timeout", "--remote-shell", "--interface"), "onnxplace-hosts"
        ),
        "commands": {**dict.fromkeys(("learn", "study"), "onnxplace-learned"), "hosts": "onnxplace-hosts"},
        "sources": {},
    }
)
_INSTALL_HINTS = {
    "onnxplace-learned": "in a checkout of onnxplace: pip install -e plugins/onnxplace-learned",
    "onnxplace-hosts": "pip install 'onnxplace[mpi]'; in a checkout of onnxplace: pip install -e '.[mpi]'",
}
# Runtimes that are parts of this distribution are listed by what they do.
_SUMMARIES = {
    "onnxplace_hosts.mpi:Mpi": "run segments with ONNX Runtime, a process per device, on one host or several",
}


@dataclass(frozen=True)
class RegistryEntry:
    """A pass, runtime, command or source of models that has a name."""

    name: str
    path: str
    """`module:attribute`."""
    summary: str
    distribution: str = ""
    """The distribution that provides it; empty for built-in ones."""


@cache
def list_entries(kind: Kind) -> Mapping[str, RegistryEntry]:
    """Return all entries by name, built-in ones first; import none of them.

    Of commands, these are the ones of plugins, and of parts of this distribution.
    """
    table = {name: RegistryEntry(name, path, summary) for name, (path, summary) in BUILTIN.get(kind, {}).items()}
    points = metadata.entry_points(group=f"onnxplace.{kind}")
    named = [(point, point.dist.name if point.dist else "an unnamed distribution") for point in points]
    for point, distribution in sorted(named, key=lambda pair: pair[1] != OWN_DISTRIBUTION):
        if known := table.get(point.name):
            table[point.name] = replace(known, summary=f"{known.summary}; that of {distribution} is ignored")
        else:
            origin = "" if distribution == OWN_DISTRIBUTION else distribution
            summary = _SUMMARIES.get(point.value, f"plugin from {distribution}")
            table[point.name] = RegistryEntry(point.name, point.value, summary, origin)
    return MappingProxyType(table)


def find_plugin(kind: Literal["passes", "runtimes"], name: str) -> type:
    """Import and return the class behind a name; raises UsageError or PluginError."""
    from onnxplace.runtime import Runtime
    from onnxplace.state import Pass

    plugin, entry = load_plugin(kind, name)
    where = f"{name!r} from {entry.distribution or 'onnxplace'}"
    base = Pass if kind == "passes" else Runtime
    if not isinstance(plugin, type) or not issubclass(plugin, base):
        expected = f"a {base.__name__}" if isinstance(plugin, type) else "a class"
        hint = f"it must subclass onnxplace.{base.__name__}"
        raise PluginError("G001", f"{entry.path} is not {expected}", where=where, hint=hint)
    if inspect.isabstract(plugin):
        missing = ", ".join(sorted(plugin.__abstractmethods__))
        raise PluginError("G001", f"{entry.path} does not define {missing}", where=where)
    return plugin


def describe_missing(kind: Kind, name: str) -> UsageError | None:
    """Return the error for what a plugin of this repository would add if it were installed."""
    if (plugin := OFFERED[kind].get(name)) is None or name in list_entries(kind):
        return None
    # All passes that these plugins add are placers, the word of the option that names them.
    noun = "placer" if kind == "passes" else NOUNS[kind]
    message = f"{noun} {name!r} is part of the plugin {plugin}, which is not installed"
    return UsageError("U001", message, hint=_INSTALL_HINTS[plugin])


def create_runtime(name: str, **options: Any) -> Runtime:
    """Return a runtime with the options that are not None.

    Raises UsageError if there is no such runtime, or it does not have them, and PluginError.
    """
    runtime_class = find_plugin("runtimes", name)
    chosen = {key: value for key, value in options.items() if value is not None}
    for key in chosen:
        if key not in inspect.signature(runtime_class).parameters:
            owners = dict.fromkeys(("fallback", "isolate"), "onnxruntime")
            owners |= {option: owner for owner, options in list_runtime_options().items() for option in options}
            hint = (
                f"leave it out, or use the runtime {owners[key]}, which has {key}" if key in owners else "leave it out"
            )
            raise UsageError("U045", f"runtime {name!r} has no option {key!r}", where=key, hint=hint)
    runtime: Runtime = runtime_class(**chosen)
    return runtime


def is_runtime_option(name: str, option: str) -> bool:
    """Return whether a runtime, or any other one whose plugin adds its options to commands, has an option."""
    parameters = inspect.signature(find_plugin("runtimes", name)).parameters
    return option in parameters or any(option in found for found in list_runtime_options().values())


@cache
def list_runtime_options() -> Mapping[str, Mapping[str, Any]]:
    """Import and return the options, each a `click.Option`, that plugins add to commands, by runtime and its argument.

    Those of a broken plugin are left out: its runtime fails on use.
    """
    found = {}
    for name in list_entries("runtime_options"):
        with suppress(PluginError):
            found[name], _ = load_plugin("runtime_options", name)
    return MappingProxyType({name: options for name, options in found.items() if isinstance(options, Mapping)})


def load_plugin(kind: Kind, name: str) -> tuple[Any, RegistryEntry]:
    """Import and return what a name stands for, and its entry; raises UsageError or PluginError."""
    noun, builtin = NOUNS[kind], BUILTIN.get(kind, {}).get(name)
    # To list the plugins of all installed distributions takes 10 ms, a fifth of opening a small bundle.
    known = {name: RegistryEntry(name, *builtin)} if builtin else list_entries(kind)
    if name not in known:
        if error := describe_missing(kind, name):
            raise error
        hint = f"{suggest_nearest(name, known)} (`onnxplace {kind}` lists them)"
        raise UsageError("U001", f"unknown {noun} {name!r}", hint=hint)
    entry = known[name]
    module, _, attribute = entry.path.partition(":")
    try:
        return getattr(import_module(module), attribute), entry
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a plugin may fail in any way, even exit; the error names it
        if not entry.distribution:
            raise
        raise PluginError(
            "G001",
            f"cannot be loaded: {type(problem).__name__}: {problem}",
            where=f"{noun} {name!r} from {entry.distribution}",
            hint=f"update or uninstall {entry.distribution}; its author sees where with --verbose",
        ) from problem
