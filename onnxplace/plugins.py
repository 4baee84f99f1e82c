"""What plugins add: a table of what is built in, and entry points.

Passes, runtimes, commands and formats are chosen by name. Others are asked in turn, and the first one that answers
counts: sources, which read other models than ONNX; recognisers, which know what the states of a model are for;
objectives, which have strategies of their own for some models; and device maps of other programs.

Listing imports nothing. A broken plugin fails only on use; the error names its distribution. A plugin cannot take the
name of a built-in one. Parts of this distribution, in `plugins/`, are found by entry points too, and count as built in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any, Literal

from onnxplace.errors import OnnxplaceError, PluginError, UsageError, suggest_nearest

Kind = Literal[
    "passes", "runtimes", "runtime_options", "commands", "sources", "recognisers", "objectives", "device_maps",
    "export_formats", "export_options", "graph_formats", "graph_functions", "device_kinds",
]  # fmt: skip
OWN_DISTRIBUTION = "onnxplace"
NOUNS: Mapping[Kind, str] = {
    "passes": "pass", "runtimes": "runtime", "runtime_options": "option", "commands": "command", "sources": "source",
    "recognisers": "recogniser", "objectives": "objective", "device_maps": "device map",
    "export_formats": "format", "export_options": "option", "graph_formats": "format", "graph_functions": "function",
    "device_kinds": "device kind",
}  # fmt: skip

# Class and summary of each built-in pass. The module in `passes/` has the name of the pass.
_PASSES = {
    "optimize": ("Optimize", "fold constants and drop unused nodes"),
    "profile": ("ProfileCosts", "measure what each node costs on each class of device"),
    "limit-errors": ("LimitErrors", "keep nodes off devices on which they are too inexact"),
    "recompute": ("Recompute", "compute values again instead of keeping them in memory"),
    "shard": ("Shard", "split operators over devices"),
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
        "commands": {
            **dict.fromkeys(("learn", "study"), "onnxplace-learned"),
            "hosts": "onnxplace-hosts",
            **dict.fromkeys(("devices", "doctor", "machines"), "onnxplace-doctor"),
        },
    }
)
_INSTALL_HINTS = {
    "onnxplace-learned": "in a checkout of onnxplace: pip install -e plugins/onnxplace-learned",
    "onnxplace-doctor": "install onnxplace again; in a checkout: pip install -e .",
    "onnxplace-hosts": "pip install 'onnxplace[mpi]'; in a checkout of onnxplace: pip install -e '.[mpi]'",
}
# Passes and runtimes that are parts of this distribution are listed by what they do.
_SUMMARIES = {
    "onnxplace_training.microbatch:Microbatch": "compute the batch of a training step in parts, adding up gradients",
    "onnxplace_training.pipelined:Pipelined": (
        "placer: layers of a training step on one device each, with micro-batches in turns"
    ),
    "onnxplace_formats.one_session:OneSession": "placer: the best for one session of ONNX Runtime, `--to ort-layers`",
    "onnxplace_hosts.mpi:Mpi": "run segments with ONNX Runtime, a process per device, on one host or several",
}


@dataclass(frozen=True)
class RegistryEntry:
    """Something that is built in or that a plugin adds, with its name."""

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


def describe_missing(kind: Kind, name: str) -> UsageError | None:
    """Return the error for what a plugin of this repository would add if it were installed."""
    if (plugin := OFFERED.get(kind, {}).get(name)) is None or name in list_entries(kind):
        return None
    # All passes that these plugins add are placers, the word of the option that names them.
    noun = "placer" if kind == "passes" else NOUNS[kind]
    message = f"{noun} {name!r} is part of the plugin {plugin}, which is not installed"
    return UsageError("U001", message, hint=_INSTALL_HINTS[plugin])


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
        message = f"cannot be loaded: {type(problem).__name__}: {problem}"
        where = f"{noun} {name!r} from {entry.distribution}"
        hint = f"update or uninstall {entry.distribution}; its author sees where with --verbose"
        raise PluginError("G001", message, where=where, hint=hint) from problem


@contextmanager
def blame_plugin(kind: Kind, entry: RegistryEntry) -> Iterator[None]:
    """Raise PluginError for a defect of a plugin from elsewhere: for any exception that is no error of onnxplace."""
    try:
        yield
    except Exception as problem:
        if not entry.distribution or isinstance(problem, OnnxplaceError):
            raise
        where = f"{NOUNS[kind]} {entry.name!r} from {entry.distribution}"
        raise PluginError("G001", f"{type(problem).__name__}: {problem}", where=where) from problem


def ask_plugins(kind: Literal["sources", "recognisers", "objectives", "device_maps"], *arguments: Any) -> Any | None:
    """Call the functions that plugins add, in order, and return the first result; None if no plugin has one."""
    for name in list_entries(kind):
        function, entry = load_plugin(kind, name)
        with blame_plugin(kind, entry):
            result = function(*arguments)
        if result is not None:
            return result
    return None
