"""Completion of the values of options and arguments in shells; nothing heavy is imported."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

# CPU devices that are offered; more are possible.
MAX_CPU_DEVICES = 4
# Entries of a folder that are looked at.
MAX_ENTRIES = 500


class BundlePath(click.Path):
    """A path of a bundle; folders with a manifest are completed."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the bundles in the folder of what was typed and one level below; any folder if there are none."""
        bundles = [path for path in _list_folders(incomplete) if os.path.isfile(os.path.join(path, "manifest.json"))]
        return [CompletionItem(path) for path in bundles] or [CompletionItem(incomplete, type="dir")]


def _list_folders(prefix: str) -> list[str]:
    """Return folders that begin with a prefix, and those one level below, sorted."""
    first = [path.rstrip(os.sep) for path in glob.iglob(f"{glob.escape(prefix)}*{os.sep}")]
    first = sorted(first)[:MAX_ENTRIES]
    below = [path.rstrip(os.sep) for folder in first for path in glob.iglob(f"{glob.escape(folder)}{os.sep}*{os.sep}")]
    return [*first, *sorted(below)[:MAX_ENTRIES]]


BUNDLE_PATH = BundlePath()


def complete_passes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the passes whose names begin so."""
    return _complete_entries("passes", incomplete)


def complete_runtimes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runtimes whose names begin so."""
    return _complete_entries("runtimes", incomplete)


def complete_placers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the placers whose names begin so, with passes of plugins, which may be placers."""
    return _complete_entries("passes", incomplete, ("placer: ", "plugin "))


def complete_pipeline(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the pipeline with each pass that its last name may become."""
    begin = re.fullmatch(r"((?:[^,{}]*(?:\{[^}]*\})?,)*)([^,{}]*)", incomplete)
    if begin is None:  # in the options of a pass
        return []
    return [
        CompletionItem(begin[1] + item.value, help=item.help) for item in _complete_entries("passes", begin[2].strip())
    ]


def _complete_entries(kind: Any, incomplete: str, beginnings: tuple[str, ...] = ("",)) -> list[CompletionItem]:
    from onnxplace.pipeline import list_entries

    return [
        CompletionItem(entry.name, help=entry.summary.removeprefix("placer: "))
        for entry in list_entries(kind).values()
        if entry.name.startswith(incomplete) and entry.summary.startswith(beginnings)
    ]


def complete_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the list of devices with each that may follow: a few CPU devices, and the GPUs of NVIDIA."""
    named, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(named + comma + device)
        for device in _list_devices()
        if device.startswith(last) and device not in named.split(",")
    ]


def _list_devices() -> Iterable[str]:
    gpus = sorted(int(path.removeprefix("/dev/nvidia")) for path in glob.glob("/dev/nvidia[0-9]*"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield from (f"cuda:{index}" for index in gpus)
    yield from (f"cpu:{index}" for index in range(min(cores, MAX_CPU_DEVICES)))


def complete_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the error codes that begin so."""
    from onnxplace.cli.error_pages import read_error_pages

    pages = read_error_pages().values()
    return [CompletionItem(page.code, help=page.meaning) for page in pages if page.code.startswith(incomplete.upper())]
