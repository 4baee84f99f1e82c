"""Completion of command lines in bash, zsh and fish: the command that prints a script, and the values of options.

Nothing heavy is imported.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from onnxplace.cli.terminal import as_json, print_result
from onnxplace.errors import UsageError

if TYPE_CHECKING:
    from onnxplace.plugins import Kind

# -------------------------------------------------------------------------------------- values of options and arguments


# CPU devices that are offered; more are possible.
MAX_CPU_DEVICES = 4
# Entries of a folder that are looked at.
MAX_ENTRIES = 500


class BundlePath(click.Path):
    """A path of a bundle; folders with a manifest are completed."""

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


class EntryChoice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """Names that are built in or entry points of a group, which are looked for only when they are needed."""

    def __init__(self, kind: Kind, *names: str) -> None:
        super().__init__(names)
        self._kind = kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Return all names."""
        from onnxplace.plugins import list_entries

        return tuple(dict.fromkeys((*self._names, *list_entries(self._kind))))

    @choices.setter
    def choices(self, names: tuple[str, ...]) -> None:
        self._names = names


BUNDLE_PATH, PATH = BundlePath(path_type=Path), click.Path(path_type=Path)


def _make_name_completer(kind: Any, summaries: tuple[str, ...] = ("",)) -> Callable[..., list[CompletionItem]]:
    """Return a function that completes the names of a kind of plugins whose summaries begin in one of these ways."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from onnxplace.plugins import list_entries

        return [
            CompletionItem(entry.name, help=entry.summary.removeprefix("placer: "))
            for entry in list_entries(kind).values()
            if entry.name.startswith(incomplete) and entry.summary.startswith(summaries)
        ]

    return complete


complete_passes, complete_runtimes = _make_name_completer("passes"), _make_name_completer("runtimes")
# Passes of plugins may be placers, too.
complete_placers = _make_name_completer("passes", ("placer: ", "plugin "))


def complete_pipeline(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the pipeline with each pass that its last name may become."""
    begin = re.fullmatch(r"((?:[^,{}]*(?:\{[^}]*\})?,)*)([^,{}]*)", incomplete)
    if begin is None:  # in the options of a pass
        return []
    names = complete_passes(ctx, param, begin[2].strip())
    return [CompletionItem(begin[1] + item.value, help=item.help) for item in names]


def complete_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the list of devices with each that may follow: a few CPU devices, and the GPUs of NVIDIA."""
    named, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(named + comma + device)
        for device in _list_devices()
        if device.startswith(last) and device not in named.split(",")
    ]


def complete_machines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the devices of the catalogue, behind the number that is typed."""
    from onnxplace.target.catalogue import read_catalogue

    number, times, name = incomplete.rpartition("x") if incomplete[:1].isdecimal() else ("", "", incomplete)
    names = [item for item in read_catalogue().devices if item.lower().startswith(name.lower())]
    return [CompletionItem(number + times + item) for item in names]


def _list_devices() -> Iterable[str]:
    from onnxplace.utils.control_groups import list_cores

    gpus = sorted(int(path.removeprefix("/dev/nvidia")) for path in glob.glob("/dev/nvidia[0-9]*"))
    yield from (f"cuda:{index}" for index in gpus)
    yield from (f"cpu:{index}" for index in range(min(len(list_cores()), MAX_CPU_DEVICES)))


# ---------------------------------------------------------------------------------------------------------- the command


PROGRAM = "onnxplace"
# Scripts for shells call the program with this variable set.
COMPLETE_VARIABLE = "_ONNXPLACE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")

# click's own script for bash sees `cpu:0` as three words. This one passes the line on as it was typed.
_BASH_SCRIPT = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value// /\\\\ }") ;;
        esac
    done < <(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT COMP_WORDBREAKS=$COMP_WORDBREAKS \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s 2>/dev/null || complete -F %(complete_func)s %(prog_name)s
"""


class LineBashComplete(BashComplete):
    """Completion for bash that keeps words with colons and equal signs whole."""

    name = "bash"
    source_template = _BASH_SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words after the program, and the incomplete one."""
        line = os.environ["COMP_LINE"].encode()[: int(os.environ["COMP_POINT"])].decode(errors="ignore")
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1:].isspace() else ""
        # bash replaces only what follows the last of its word breaks.
        breaks = [incomplete.rfind(sign) for sign in ":=" if sign in os.environ.get("COMP_WORDBREAKS", ":=")]
        kept = incomplete[: max(breaks, default=-1) + 1]
        self._kept = kept.partition("=")[2] if kept.startswith("-") else kept
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Return a line for the script, without what stays on the command line."""
        return f"{item.type},{str(item.value).removeprefix(self._kept)}"


add_completion_class(LineBashComplete)


@click.command(short_help="Print a script that completes command lines in a shell.")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@as_json
def completion(shell: Literal["bash", "zsh", "fish"] | None, json_: bool) -> None:
    """Print a script that completes commands, options, placers, passes, runtimes, devices, bundles and error codes.

    \b
    bash:  onnxplace completion bash > ~/.local/share/bash-completion/completions/onnxplace
    zsh:   onnxplace completion zsh > "${fpath[1]}/_onnxplace"
    fish:  onnxplace completion fish > ~/.config/fish/completions/onnxplace.fish

    Or for this shell only:  eval "$(onnxplace completion bash)"
    """  # noqa: D301 - \b tells click to keep the line breaks
    name = shell or Path(os.environ.get("SHELL", "")).name
    script_class = get_completion_class(name) if name in SHELLS else None
    if script_class is None:
        message = f"expected a shell, one of {', '.join(SHELLS)}, got {name or 'none'}"
        raise UsageError("U005", message, where="SHELL", hint="onnxplace completion bash")
    script = script_class(click.Command(PROGRAM), {}, PROGRAM, COMPLETE_VARIABLE).source()
    print_result(json_, {"shell": name, "script": script}, script)
