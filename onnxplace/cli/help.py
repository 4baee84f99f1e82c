"""Help on commands with many options, in groups and with those that plugins add to runtimes, and on passes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal

import click
from click.core import ParameterSource

# Groups in their order, with the parameters of all commands that belong there; others come last.
GROUPS = {
    "Devices": "devices providers target machine save_target max_memory links strict runtime fallback",
    "Choice of a machine": "latency rate fit price",
    "Addresses": "host port grpc_port",
    "Sizes and inputs": (
        "shape plans fixed_sizes inputs against state llm sizes steps seed custom_op_library graph_format data batch"
    ),
    "Search": "objective placer effort budget pipeline costs save_costs no_cache estimate no_trial placement",
    "Splitting and constraints": (
        "shard shard_map shard_metadata recompute stream pool max_error device_map colocate groups fuse forward_only "
        "post_adjust"
    ),
    "Limits of each model": "max_batch max_delay max_in_flight max_queue max_request max_sequences",
    "Running": "repeat in_flight timeout no_memory min_speedup lr schedule warmup resume on_nan",
    "Output": (
        "explain diff output outputs link_weights force report trace record save save_every log plot export json_ "
        "quiet verbose _click_default_help"
    ),
}
# The command whose help describes the options that plugins add to runtimes.
DESCRIBES_RUNTIMES = "run"
# Under this name, the context of a command has these options, if its line may name one.
_META_KEY = "onnxplace.runtime_options"
# Longer flags have their own line.
COLUMN = 30
Row = tuple[str, str]


class GroupedCommand(click.Command):
    """A command whose help has its options in groups; if it takes `--runtime`, also those that plugins add to runtimes.

    To find the plugins takes as long as to open a small bundle, so it does that only where an option is not its own.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the line."""
        own = {flag for item in self.params for flag in item.opts}
        if ctx.resilient_parsing or any(item.partition("=")[0] not in own for item in args if item.startswith("--")):
            self.add_runtime_options(ctx)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with those that were added."""
        added = [option for group in ctx.meta.get(_META_KEY, {}).values() for option in group.values()]
        return [*super().get_params(ctx), *added]

    def add_runtime_options(self, ctx: click.Context) -> None:
        """Add the options of plugins to the parameters in this context."""
        has_runtime = any("--runtime" in item.opts for item in self.params)
        ctx.meta[_META_KEY] = list_added_options(self, "runtime_options") if has_runtime else {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        self.add_runtime_options(ctx)
        options = [item for item in self.get_params(ctx) if isinstance(item, click.Option)]
        rows = {str(item.name): row for item in options if (row := item.get_help_record(ctx))}
        width = min(max(len(flags) for flags, _ in rows.values()), COLUMN)
        for title, names in GROUPS.items():
            _write_group(formatter, title, _pop_rows(rows, names.split()), width)
        for runtime, added in ctx.meta[_META_KEY].items():
            own = _pop_rows(rows, [str(option.name) for option in added.values()])
            if own and self.name != DESCRIBES_RUNTIMES:
                flags = ", ".join(flag.split()[0] for flag, _ in own)
                own = [(flags, f"`onnxplace {DESCRIBES_RUNTIMES} --help` describes them.")]
            _write_group(formatter, f"With --runtime {runtime}", own, width)
        _write_group(formatter, "Other options", list(rows.values()), width)


def list_added_options(
    command: click.Command, kind: Literal["runtime_options", "export_options"]
) -> dict[str, dict[str, click.Option]]:
    """Return the options of plugins that a command does not have itself, by runtime or format and its argument."""
    from onnxplace.pipeline.registry import list_options

    taken = {word for item in command.params for word in (item.name, *item.opts)}
    added: dict[str, dict[str, click.Option]] = {}
    for owner, options in list_options(kind).items():
        added[owner] = {key: option for key, option in options.items() if taken.isdisjoint((option.name, *option.opts))}
        taken |= {word for option in options.values() for word in (option.name, *option.opts)}
    return added


def _pop_rows(rows: dict[str, Row], names: Sequence[str]) -> list[Row]:
    return [rows.pop(name) for name in names if name in rows]


def take_runtime_options(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that plugins add to runtimes; return those that are given, by argument of the runtime."""
    context = click.get_current_context()
    added = [item for group in context.meta.get(_META_KEY, {}).values() for item in group.items()]
    values = [(key, given.pop(option.name), context.get_parameter_source(option.name)) for key, option in added]
    return {key: value for key, value, source in values if source is not ParameterSource.DEFAULT}


def _write_group(formatter: click.HelpFormatter, title: str, rows: list[Row], width: int) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl([(flags.ljust(width), text) for flags, text in rows], COLUMN)


# -------------------------------------------------------------------------------------------------- passes and runtimes


# The names of bounds in annotated_types, in words.
_BOUND_NAMES = {"Ge": "at least", "Gt": "more than", "Le": "at most", "Lt": "less than"}


def format_pass_help(kind: type) -> tuple[str, dict[str, Any]]:
    """Return the help on a pass or a runtime, as text and as data, from its docstring and its fields."""
    from onnxplace.utils.docstrings import read_field_docs

    options = []
    if is_dataclass(kind):
        about_fields = read_field_docs(kind)
        options = [
            {
                "name": item.name,
                "type": _format_type(item.type),
                "default": None if item.default is MISSING else item.default,
                "about": about_fields.get(item.name, ""),
            }
            for item in fields(kind)
        ]
    about = inspect.cleandoc(kind.__doc__ or "")
    lines = [
        f"  {option['name']}={option['default']!r}  ({option['type']})\n      {option['about']}" for option in options
    ]
    listed = "\n".join(["options:", *lines]) if lines else "no options"
    return f"{about}\n\n{listed}", {"about": about, "options": options}


def _format_type(annotation: object) -> str:
    """Format the type of an option.

    `Annotated[float, Ge(0)]` gives `float, at least 0`.
    """
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    annotated = re.fullmatch(r"(?:typing\.)?Annotated\[([^\[\],]+), (.*)\]", text)
    if not annotated:
        return text
    limits = re.findall(r"\b(Ge|Gt|Le|Lt)\((?:\w+=)?([^()]*)\)", annotated[2])
    return ", ".join([annotated[1], *(f"{_BOUND_NAMES[name]} {value}" for name, value in limits)])
