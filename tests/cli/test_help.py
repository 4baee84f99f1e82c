"""`--help` of commands with many options: in groups, and the options of several hosts in one command."""

import re

import pytest

from onnxplace.cli.help import GROUPS, SEVERAL_HOSTS, GroupedCommand
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
        if option.param_type_name == "option" and option.name not in GROUPS[SEVERAL_HOSTS].split():
            assert (
                len(re.findall(rf"^  (-\w, )?{re.escape(max(option.opts, key=len))}(?![\w-])", text, re.MULTILINE)) == 1
            )


def test_options_of_several_hosts_are_described_once(run_cli):
    texts = {name: run_cli(name, "--help").out for name in ("run", "verify", "bench")}
    assert [name for name, text in texts.items() if "copies of the bundle" in " ".join(text.lower().split())] == ["run"]
    for name in ("verify", "bench"):
        assert "  --hosts, --replicas, --start-timeout, --remote-shell, --interface\n" in texts[name]
        assert "`onnxplace run --help`" in texts[name]
