"""The command `onnxplace learn`: placers that learn, and graphs for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxplace.cli.options import announce_loop_compilation, as_json, print_json, seed_option
from onnxplace.errors import UsageError, format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnxplace.learn import CurvePoint, GuidedPoint, LearningGraph

nodes_option = click.option(
    "--nodes", type=click.IntRange(1), default=200, show_default=True, help="Of each graph, approximately."
)
backward_option = click.option("--backward", is_flag=True, help="Add backward passes; half of the nodes are theirs.")
family_help = "`onnxplace learn families` lists them."


@click.group(short_help="Train placers that learn.")
def learn() -> None:
    """Train placers that learn, in simulated time.

    \b
    Example:  onnxplace learn placeto --family encoder_decoder --devices 2 --seconds 600 -o policy.safetensors
              onnxplace place graph.json --placer 'placeto{policy=policy.safetensors}'
    """  # noqa: D301 - \b tells click to keep the line breaks


@learn.command(short_help="List the families of generated graphs.")
@as_json
def families(json_: bool) -> None:
    """List the families of generated graphs."""
    from onnxplace.cost_graph import FAMILIES
    from onnxplace.report import format_table

    if json_:
        print_json({"families": [{"name": name, "summary": summary} for name, summary in FAMILIES.items()]})
    else:
        click.echo(format_table(("family", ""), list(FAMILIES.items()), left=2))


@learn.command(short_help="Write generated graphs into a folder.")
@click.option("--family", required=True, metavar="NAME", help=family_help)
@click.option("--count", type=click.IntRange(1), default=32, show_default=True, help="How many graphs.")
@nodes_option
@backward_option
@click.option(
    "--side", type=click.Choice(["train", "test"]), default="train", show_default=True, help="No graph is on both."
)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Of each graph  [default: the family's]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Made if needed."
)
@as_json
def graphs(
    *, family: str, count: int, nodes: int, backward: bool, side: Any, devices: int | None, output: Path, json_: bool
) -> None:
    """Write generated cost graphs as GraphML, for `onnxplace place` and `onnxplace learn placeto --graphs`."""
    from onnxplace.cost_graph import GraphSet, draw_graphs, write_cost_graph
    from onnxplace.driver import replace_devices
    from onnxplace.utils import cannot_write_error

    drawn = draw_graphs(GraphSet(family, count, nodes, side, backward))
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_write_error(problem, output) from None
    paths = [output / f"{graph.name}.graphml" for graph in drawn]
    for path, graph in zip(paths, drawn):
        write_cost_graph(path, replace_devices(graph, devices, None))
    if json_:
        print_json({"files": [str(path) for path in paths]})
    else:
        click.echo(f"{format_count(len(paths), 'graph')} written to {output}")


@learn.command(short_help="Train the policy of the placer placeto.")
@click.option("--family", metavar="NAME", help=family_help)
@click.option(
    "--graphs",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Cost graphs (JSON, GraphML, GEXF) and ONNX models, instead of a family.",
)
@click.option("--count", type=click.IntRange(1), default=32, show_default=True, help="How many graphs of the family.")
@nodes_option
@backward_option
@click.option(
    "--devices", type=click.IntRange(1, 256), default=2, show_default=True, help="The most that it will know."
)
@click.option("--seconds", type=click.FloatRange(0), default=0.0, help="Time limit.")
@click.option("--updates", type=click.IntRange(0), default=0, help="Updates of the policy, for a repeatable result.")
@click.option("--order", default="topological", show_default=True, help="In which nodes are visited.")
@click.option("--start", default="m-etf", show_default=True, help="What episodes start from: m-etf, first-device.")
@click.option("--episodes", type=click.IntRange(2), default=8, show_default=True, help="Of one graph, for each update.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of torch.")
@seed_option
@click.option("--resume", is_flag=True, help="Continue from the checkpoint next to the policy.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="F.safetensors", help="The policy."
)
@as_json
def placeto(
    *, family: str | None, folder: Path | None, count: int, nodes: int, backward: bool, devices: int, seconds: float,
    updates: int, order: Any, start: Any, episodes: int, threads: int, seed: int, resume: bool, output: Path,
    json_: bool,
) -> None:  # fmt: skip
    """Train the policy of the placer `placeto` on generated graphs, or on those in a folder.

    Writes the policy that places unseen graphs best, a checkpoint, and the learning curve as CSV and, if matplotlib is
    installed, as PNG. Ctrl-C leaves a checkpoint for --resume.
    """
    from onnxplace.learn import LearnOptions, learn_placeto
    from onnxplace.passes.learning import Order, Settings, Start, require_torch

    require_torch()
    _require_choice(order, get_args(Order), "--order")
    _require_choice(start, get_args(Start), "--start")
    _require_policy_name(output)
    settings = Settings(episodes=episodes, seed=seed)
    options = LearnOptions(devices, seconds, updates, order, start, settings, threads)
    problems = _collect_problems(family, folder, count, nodes, backward, devices)
    announce_loop_compilation(json_)
    label = family or str(folder)
    with _show_training(json_) as observer:
        result = learn_placeto(problems, options, output, family=label, resume=resume, observer=observer)
    point = min(result.points, key=lambda item: item.validation_cost)
    if json_:
        files = [str(path) for path in result.files]
        print_json({"graphs": len(problems), "files": files, "best": vars(point), "points": len(result.points)})
        return
    last = result.points[-1]
    click.echo(f"{label}: {format_count(len(problems), 'graph')}, {last.updates} updates in {last.seconds:.0f} s")
    click.echo(
        f"unseen graphs: step {point.validation_cost:.4f} of one device, started from {point.start_cost:.4f} "
        f"(update {point.updates})"
    )
    click.echo(f"written: {', '.join(str(path) for path in result.files)}")


@learn.command(short_help="Train the policy of the placer guided.")
@click.option(
    "--family", multiple=True, metavar="NAME", help=f"Again for more; all architectures without. {family_help}"
)
@click.option(
    "--graphs",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Cost graphs (JSON, GraphML, GEXF) and ONNX models, instead of families.",
)
@click.option(
    "--count", type=click.IntRange(1), default=8, show_default=True,
    help="Graphs of each family, size and number of devices.",
)  # fmt: skip
@nodes_option
@click.option("--devices", type=click.IntRange(1, 256), default=4, show_default=True, help="The most of a graph.")
@click.option("--seconds", type=click.FloatRange(0), default=0.0, help="Time limit, after the searches.")
@click.option("--steps", type=click.IntRange(0), default=0, help="Steps of the training, for a repeatable result.")
@click.option(
    "--proposals", type=click.IntRange(1), default=5_000, show_default=True, help="Of searches for what to imitate."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of torch.")
@seed_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="F.safetensors", help="The policy."
)
@as_json
def guided(
    *, family: tuple[str, ...], folder: Path | None, count: int, nodes: int, devices: int, seconds: float, steps: int,
    proposals: int, threads: int, seed: int, output: Path, json_: bool,
) -> None:  # fmt: skip
    """Train the policy of the placer `guided` on generated graphs, or on those in a folder.

    It first imitates placements that a search finds, and is then reinforced on its own. Writes the policy that places
    unseen graphs best, and the learning curve as CSV. Ctrl-C leaves the best policy so far.
    """
    from onnxplace.cost_graph import ARCHITECTURES
    from onnxplace.learn import GuidedOptions, draw_mixture, learn_guided, read_problems
    from onnxplace.passes.learning import require_torch

    require_torch()
    _require_policy_name(output)
    if family and folder is not None:
        raise UsageError("H009", "expected either --family or --graphs, got both")
    options = GuidedOptions(seconds=seconds, steps=steps, proposals=proposals, seed=seed, threads=threads)
    names = family or tuple(ARCHITECTURES)
    problems = draw_mixture(names, count, nodes, devices) if folder is None else read_problems(folder, devices)
    announce_loop_compilation(json_)
    label = ", ".join(names) if folder is None else str(folder)
    with _show_training(json_) as observer:
        result = learn_guided(problems, options, output, families=label, observer=observer)
    point = min(result.points, key=lambda item: item.validation_cost)
    if json_:
        files = [str(path) for path in result.files]
        print_json({"graphs": len(problems), "files": files, "best": vars(point), "points": len(result.points)})
        return
    last = result.points[-1]
    click.echo(f"{label}: {format_count(len(problems), 'graph')}, {last.updates} steps in {last.seconds:.0f} s")
    click.echo(
        f"unseen graphs, next to the best of one device, m-TOPO, m-ETF and m-SCT: policy {point.validation_cost:.4f} "
        f"(step {point.updates}), search {point.teacher_cost:.4f}"
    )
    click.echo(f"written: {', '.join(str(path) for path in result.files)}")


def _collect_problems(
    family: str | None, folder: Path | None, count: int, nodes: int, backward: bool, devices: int
) -> list[LearningGraph]:
    """Return the graphs to learn from; raises UsageError unless there is one source."""
    from onnxplace.cost_graph import GraphSet
    from onnxplace.learn import draw_problems, read_problems

    if (family is None) == (folder is None):
        message = "expected either --family or --graphs, got " + ("both" if family else "neither")
        raise UsageError("H009", message, hint=f"--family NAME: {family_help}")
    if folder is not None:
        return read_problems(folder, devices)
    return draw_problems(GraphSet(str(family), count, nodes, "train", backward), devices)


def _require_choice(value: str, choices: tuple[str, ...], option: str) -> None:
    from onnxplace.errors import suggest_nearest

    if value not in choices:
        message = f"expected one of {', '.join(choices)}, got {value!r}"
        raise UsageError("U005", message, where=option, hint=suggest_nearest(value, choices))


def _require_policy_name(output: Path) -> None:
    """Raise UsageError unless a name ends in .safetensors, so that the other files get names of their own."""
    if output.suffix != ".safetensors":
        message = f"expected a file that ends in .safetensors, got {output.name!r}"
        raise UsageError("U032", message, where="--output", hint=f"{output.stem}.safetensors")


@contextmanager
def _show_training(quiet: bool) -> Iterator[Callable[[float, CurvePoint | GuidedPoint], None] | None]:
    """Show a progress bar on stderr if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("first updates", total=1.0)

        def observe(progress: float, point: CurvePoint | GuidedPoint) -> None:
            text = f"update {point.updates}, unseen graphs {point.validation_cost:.4f}"
            bar.update(task, completed=progress, description=text)

        yield observe
