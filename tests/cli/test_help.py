"""`--help` of commands with many options: in groups."""

import re

import pytest

from onnxplace.cli.help import GROUPS, GroupedCommand
from tests.support.commands import load_all_commands

COMMANDS = load_all_commands()
GROUPED = [name for name, command in COMMANDS.items() if isinstance(command, GroupedCommand)]


def test_the_commands_with_most_options_have_groups():
    assert {"compile", "plan", "place", "run", "verify", "bench", "train"} <= set(GROUPED)


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_is_in_one_group_in_their_order(run_cli, name):
    text = run_cli(name, "--help").out
    titles = [line[:-1] for line in text.splitlines() if line[:-1] in GROUPS]
    assert titles == [title for title in GROUPS if title in titles]
    for option in COMMANDS[name].params:
        if option.param_type_name == "option":
            assert (
                len(re.findall(rf"^  (-\w, )?{re.escape(max(option.opts, key=len))}(?![\w-])", text, re.MULTILINE)) == 1
            )
