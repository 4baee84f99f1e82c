"""The command `onnxplace completion`: scripts that complete command lines in bash, zsh and fish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    shell_complete,
    split_arg_string,
)

from onnxplace.cli.options import as_json, print_json, print_text
from onnxplace.errors import UsageError

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


def complete_line(cli: click.Command, instruction: str) -> int:
    """Print completions as a script for a shell asks for them; return an exit code."""
    return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)


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
    if json_:
        print_json({"shell": name, "script": script})
    else:
        print_text(script)
