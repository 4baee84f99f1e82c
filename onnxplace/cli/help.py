"""The help of commands with many options: in groups, and those of several hosts in one command only."""

from __future__ import annotations

import click

SEVERAL_HOSTS = "Several hosts, with --runtime mpi"
# Groups in their order, with the parameters of all commands that belong there; others come last.
GROUPS = {
    "Devices": "devices target machine save_target max_memory links strict runtime fallback",
    "Choice of a machine": "latency rate fit price",
    "Addresses": "host port grpc_port",
    "Sizes and inputs": (
        "shape fixed_sizes inputs against state llm sizes steps seed custom_op_library graph_format data batch"
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
    SEVERAL_HOSTS: "hosts replicas start_timeout remote_shell interface",
}
# The command whose help describes the options of several hosts.
DESCRIBES_HOSTS = "run"
# Longer flags have a line of their own.
COLUMN = 30
Row = tuple[str, str]


class GroupedCommand(click.Command):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        options = [item for item in self.get_params(ctx) if isinstance(item, click.Option)]
        rows = {str(item.name): row for item in options if (row := item.get_help_record(ctx))}
        width = min(max(len(flags) for flags, _ in rows.values()), COLUMN)
        for title, names in GROUPS.items():
            own = [rows.pop(name) for name in names.split() if name in rows]
            if title == SEVERAL_HOSTS and own and self.name != DESCRIBES_HOSTS:
                flags = ", ".join(flag.split()[0] for flag, _ in own)
                own = [(flags, f"`onnxplace {DESCRIBES_HOSTS} --help` describes them.")]
            _write_group(formatter, title, own, width)
        _write_group(formatter, "Other options", list(rows.values()), width)


def _write_group(formatter: click.HelpFormatter, title: str, rows: list[Row], width: int) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl([(flags.ljust(width), text) for flags, text in rows], COLUMN)
