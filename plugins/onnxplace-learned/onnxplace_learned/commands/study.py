"""The command `onnxplace study`: published studies, repeated on generated graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxplace.cli.shared_options import announce_loop_compilation, as_json, print_json, print_text
from onnxplace.cli.terminal import show_progress
from onnxplace.errors import UsageError, format_count
from onnxplace_learned.commands.learning_options import FAMILY_HELP, MAX_DEVICES, require_choice

if TYPE_CHECKING:
    from onnxplace_learned.policy_training.order_study import FamilyStudy, StudyRow


@click.group(short_help="Repeat published studies on generated graphs.")
def study() -> None:
    """Repeat published studies on generated graphs."""


@study.command(short_help="Compare the orders in which a policy visits nodes.")
@click.option(
    "--family", multiple=True, metavar="NAME", help=f"May be repeated. Default: all architectures. {FAMILY_HELP}"
)
@click.option("--order", multiple=True, metavar="NAME", help="May be repeated. Default: all orders.")
@click.option("--seeds", type=click.IntRange(1), default=10, show_default=True, help="Number of seeds for each graph.")
@click.option("--count", type=click.IntRange(1), default=6, show_default=True, help="Graphs of each family.")
@click.option("--nodes", type=click.IntRange(1), default=60, show_default=True, help="Nodes per graph, approximately.")
@click.option("--devices", type=click.IntRange(1, MAX_DEVICES), default=3, show_default=True, help="Devices per graph.")
@click.option("--episodes", type=click.IntRange(1), default=50, show_default=True, help="Training episodes per graph.")
@click.option("--workers", type=click.IntRange(1), help="Number of processes  [default: one for each core]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="F.csv", help="A row for each training.")
@click.option("--resume", is_flag=True, help="Keep the rows that are in F.csv already.")
@as_json
def traversal(
    *, family: tuple[str, ...], order: Any, seeds: int, count: int, nodes: int, devices: int, episodes: int,
    workers: int | None, output: Path | None, resume: bool, json_: bool,
) -> None:  # fmt: skip
    """Compare the orders in which Placeto's policy visits the nodes of a graph.

    For each graph, order and seed, a policy is trained from nothing, and the best placement that it finds counts. As in
    the study of Wang et al. (arXiv 2201.09676), there are 50 episodes on 3 devices, and only the order differs. Ctrl-C
    leaves the rows so far in F.csv, for --resume.
    """
    from onnxplace.machine.hardware import available_cores
    from onnxplace_learned.graphs.architectures import ARCHITECTURES
    from onnxplace_learned.policies.environment import ORDERS, Order
    from onnxplace_learned.policy_training.order_study import StudyOptions, run_study, summarise_study

    for name in order:
        require_choice(name, get_args(Order), "--order")
    if resume and output is None:
        raise UsageError("U005", "--resume needs the file of the rows", where="--resume", hint="-o F.csv")
    options = StudyOptions(
        families=tuple(dict.fromkeys(family)) or tuple(ARCHITECTURES),
        orders=tuple(dict.fromkeys(order)) or tuple(ORDERS),
        seeds=seeds,
        graphs=count,
        nodes=nodes,
        devices=devices,
        episodes=episodes,
        workers=workers or len(available_cores()),
    )
    announce_loop_compilation(json_)
    with show_progress(json_, "trainings") as display:

        def count_runs(done: int, total: int) -> None:
            if display:
                if not display.share:
                    display.resume_at((done - 1) / total)
                display.advance(done / total, f"{done} of {total}")

        rows = run_study(options, output, resume=resume, observer=count_runs)
    families = summarise_study(rows)
    if json_:
        print_json({"options": asdict(options), "rows": len(rows), "families": [asdict(item) for item in families]})
        return
    _print_families(families, rows)
    if output:
        print_text(f"rows: {output}")


def _print_families(families: Sequence[FamilyStudy], rows: Sequence[StudyRow]) -> None:
    """Print a table per family, with its recommendation."""
    from onnxplace.reports.text import format_table

    print_text(f"steps relative to one device, geometric means of {format_count(len(rows), 'training')}")
    for item in families:
        worse = {quality.order: [] for quality in item.qualities}  # type: dict[str, list[str]]
        for difference in item.differences:
            worse[difference.better].append(difference.worse)
        table = [
            (
                quality.order,
                f"{quality.mean:.4f}",
                f"{quality.low:.4f} to {quality.high:.4f}",
                ", ".join(worse[quality.order]) or "-",
            )
            for quality in item.qualities
        ]
        print_text(f"\n{item.family}")
        print_text(format_table(("order", "step", "95 %", "significantly better than"), table))
        print_text(f"recommended: {item.recommendation}")
