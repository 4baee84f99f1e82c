"""The command `onnxplace learn`: placers that learn, and graphs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxplace.cli.shared_options import as_json, print_json, print_text
from onnxplace.errors import format_count
from onnxplace_learned.commands.learning_options import (
    FAMILY_HELP,
    LearnRequest,
    backward_option,
    collect_graphs,
    learning_options,
    nodes_option,
    report_training,
    require_choice,
    show_training,
)

if TYPE_CHECKING:
    from onnxplace_learned.policies.sequence_policy import SequenceShape
    from onnxplace_learned.policy_training.learning_graphs import LearningGraph
    from onnxplace_learned.policy_training.measured_training import MeasuredPoint
    from onnxplace_learned.policy_training.placeto_training import PlacetoOptions
    from onnxplace_learned.policy_training.training_loop import LearnOptions, LearnResult, TurnTraining


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
    from onnxplace.reports.text import format_table
    from onnxplace_learned.graphs.graph_sets import FAMILIES

    if json_:
        print_json({"families": [{"name": name, "summary": summary} for name, summary in FAMILIES.items()]})
    else:
        print_text(format_table(("family", ""), list(FAMILIES.items()), left=2))


@learn.command(short_help="Write generated graphs into a folder.")
@click.option("--family", required=True, metavar="NAME", help=FAMILY_HELP)
@click.option("--count", type=click.IntRange(1), default=32, show_default=True, help="How many graphs.")
@nodes_option
@backward_option
@click.option(
    "--side",
    type=click.Choice(["train", "test"]),
    default="train",
    show_default=True,
    help="Train and test graphs never overlap.",
)
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Devices per graph  [default: set by the family]")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Created if missing."
)
@as_json
def graphs(
    *, family: str, count: int, nodes: int, backward: bool, side: Any, devices: int | None, output: Path, json_: bool
) -> None:
    """Write generated cost graphs as GraphML, for `onnxplace place` and `onnxplace learn placeto --graphs`."""
    from onnxplace.cost_graph.cost_graphs import write_cost_graph
    from onnxplace.driver.place import replace_devices
    from onnxplace.utils.files import cannot_write_error
    from onnxplace_learned.graphs.graph_sets import GraphSet, draw_graphs

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
        print_text(f"{format_count(len(paths), 'graph')} written to {output}")


def sequence_command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command that trains a policy of `hierarchical` or `go`, which have the same words and shared options."""
    text = f"""Train the policy of the placer `{name}` on generated graphs, or on those in a folder.

    Writes the policy that places unseen graphs best, a checkpoint, and the learning curve as CSV and, if matplotlib is
    installed, as PNG. Ctrl-C leaves a checkpoint for --resume.
    """
    make = learn.command(short_help=f"Train the policy of the placer {name}.", help=text)
    return lambda command: make(learning_options()(command))


def placements_option(default: int) -> Callable[..., Any]:
    """Return the option for the number of placements of an update."""
    return click.option(
        "--placements",
        type=click.IntRange(2),
        default=default,
        show_default=True,
        help="Placements sampled per graph and update.",
    )


@learn.command(short_help="Train the policy of the placer placeto.")
@learning_options()
@click.option("--order", default="topological", show_default=True, help="Order in which nodes are visited.")
@click.option(
    "--start",
    default=None,
    help="What episodes start from: several, m-etf, first-device, auto  [default: several; auto with measured rewards]",
)
@click.option(
    "--learn-from",
    default="completions",
    show_default=True,
    metavar="completions|rewards",
    help="completions: learn from search results. rewards: REINFORCE, as in the paper; always used with "
    "--reward measured.",
)
@click.option(
    "--episodes",
    type=click.IntRange(2),
    default=None,
    help="Episodes per graph and update from rewards  [default: 8; 4 with measured rewards]",
)
@click.option(
    "--reward",
    default="simulated",
    show_default=True,
    metavar="simulated|measured",
    help="Simulated steps, or those of running the bundle of each episode on this machine.",
)
@click.option(
    "--groups",
    type=click.IntRange(1),
    default=40,
    show_default=True,
    help="With measured rewards, the most that nodes are joined into.",
)
def placeto(
    request: LearnRequest,
    *,
    order: Any,
    start: Any,
    learn_from: Any,
    episodes: int | None,
    reward: Any,
    groups: int,
) -> None:
    """Train the policy of the placer `placeto` on generated graphs, or on those in a folder.

    Writes the policy that places unseen graphs best, a checkpoint, and the learning curve as CSV and, if matplotlib is
    installed, as PNG. Ctrl-C leaves a checkpoint for --resume.

    \b
    With --reward measured, the graphs are ONNX models, and the best placement is kept as a device map, too:
    onnxplace learn placeto --graphs model.onnx --devices cpu:0,cpu:1 --reward measured --seconds 300 -o own.safetensors
    onnxplace compile model.onnx --devices cpu:0,cpu:1 --device-map own.device-map.json
    """  # noqa: D301 - \b tells click to keep the line breaks
    from onnxplace_learned.policies.environment import Order, Reward, Start
    from onnxplace_learned.policies.placeto_learning import Settings
    from onnxplace_learned.policies.placeto_network import LearnFrom
    from onnxplace_learned.policy_training.placeto_training import PlacetoOptions, PlacetoTraining
    from onnxplace_learned.pytorch import require_torch

    require_torch()
    is_measured = reward == "measured"
    start = start or ("auto" if is_measured else "several")
    require_choice(order, get_args(Order), "--order")
    require_choice(start, get_args(Start), "--start")
    require_choice(learn_from, get_args(LearnFrom), "--learn-from")
    require_choice(reward, get_args(Reward), "--reward")
    settings = Settings(episodes=episodes or (4 if is_measured else 8), seed=request.seed)
    if learn_from == "completions" and not is_measured:
        settings = Settings.for_completions(request.seed)
    options = PlacetoOptions(
        devices=request.devices,
        seconds=request.seconds,
        updates=request.updates,
        order=order,
        start=start,
        settings=settings,
        threads=request.threads,
        max_groups=groups,
    )
    if is_measured:
        _learn_measured(request, options)
        return
    graphs, result = _train(PlacetoTraining, request, options)
    point = next(item for item in result.points if item.updates == result.policy.updates)
    quality = (
        f"unseen graphs: step {point.validation_cost:.4f} of one device, started from {point.start_cost:.4f} "
        f"(update {point.updates})"
    )
    report_training(request, graphs, result, unit="updates", quality=quality)


def _train(
    kind: type[TurnTraining],
    request: LearnRequest,
    options: LearnOptions,
    describe: Callable[[Any], str] | None = None,
) -> tuple[list[LearningGraph], LearnResult]:
    """Train a policy, showing progress in the words of `describe`; return what was learned from, and the result."""
    from onnxplace_learned.policy_training.training_loop import learn_policy

    graphs = collect_graphs(request)
    with show_training(request, describe) as observer:
        result = learn_policy(
            kind, graphs, options, request.output, family=request.label, resume=request.resume, observer=observer
        )
    return graphs, result


def _learn_measured(request: LearnRequest, options: PlacetoOptions) -> None:
    """Train with measured rewards, and print what was learned."""
    from onnxplace.machine.hardware import local_target
    from onnxplace_learned.policy_training.measured_training import MeasuredTraining

    if request.target is None:  # the devices have to exist
        request = replace(request, target=local_target([f"cpu:{index}" for index in range(request.devices)]))
    graphs, result = _train(MeasuredTraining, request, options, _describe_measured)
    last = result.points[-1]
    cost = min(point.validation_cost for point in result.points)
    quality = (
        f"measured steps: kept placement {result.measured_ratio:.4f} of the search's, in turns; "
        f"policy {cost:.4f} of its start's\n"
        f"bundles that were run: {last.bundles}; disturbed by other work on the machine: {last.disturbed}"
    )
    report_training(request, graphs, result, unit="updates", quality=quality)


def _describe_measured(point: MeasuredPoint) -> str:
    return f"update {point.updates}, {point.bundles} bundles run, best step {point.best_cost:.4f} of the start's"


@learn.command(short_help="Train the policy of the placer guided.")
@learning_options(limit="steps", count=8, devices=4, several=True)
@click.option(
    "--proposals",
    type=click.IntRange(1),
    default=5_000,
    show_default=True,
    help="Search moves per placement to imitate.",
)
def guided(request: LearnRequest, *, proposals: int) -> None:
    """Train the policy of the placer `guided` on generated graphs, or on those in a folder.

    It first imitates placements that a search finds, and is then reinforced on its own. Writes the policy that places
    unseen graphs best, a checkpoint, and the learning curve as CSV and, if matplotlib is installed, as PNG. Ctrl-C
    leaves a checkpoint for --resume. The time limit does not include the searches.
    """
    from onnxplace_learned.policy_training.guided_training import GuidedOptions, learn_guided
    from onnxplace_learned.pytorch import require_torch

    require_torch()
    options = GuidedOptions(
        seconds=request.seconds,
        steps=request.updates,
        proposals=proposals,
        seed=request.seed,
        threads=request.threads,
    )
    graphs = collect_graphs(request, mixture=True)
    with show_training(request) as observer:
        result = learn_guided(
            graphs, options, request.output, families=request.label, resume=request.resume, observer=observer
        )
    point = min(result.points, key=lambda item: item.validation_cost)
    quality = (
        f"unseen graphs, next to the best of one device, m-TOPO, m-ETF and m-SCT: policy {point.validation_cost:.4f} "
        f"(step {point.updates}), search {point.teacher_cost:.4f}"
    )
    report_training(request, graphs, result, unit="steps", quality=quality)


@sequence_command("hierarchical")
@click.option("--groups", default="learned", show_default=True, help="learned (HDP), given (ColocRL), each.")
@click.option(
    "--max-groups",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Groups per graph, learned or given.",
)
@placements_option(16)
def hierarchical(request: LearnRequest, *, groups: Any, max_groups: int, placements: int) -> None:
    """Train the policy of the placer `hierarchical`."""
    from onnxplace_learned.policies.sequence_policy import GroupsFrom, SequenceShape
    from onnxplace_learned.pytorch import require_torch

    require_torch()
    require_choice(groups, get_args(GroupsFrom), "--groups")
    _learn_sequence(request, SequenceShape("hierarchical", groups, request.devices, max_groups), placements)


@sequence_command("go")
@click.option(
    "--heads", default="placement+schedule", show_default=True, help="placement+schedule (GO), placement (GDP)."
)
@click.option(
    "--order",
    default="criticality",
    show_default=True,
    help="Tie-break between equal priorities: criticality, topological.",
)
@placements_option(8)
def go(request: LearnRequest, *, heads: Any, order: Any, placements: int) -> None:
    """Train the policy of the placer `go`."""
    from onnxplace_learned.policies.sequence_graph import ListOrder
    from onnxplace_learned.policies.sequence_policy import Heads, SequenceShape
    from onnxplace_learned.pytorch import require_torch

    require_torch()
    require_choice(heads, get_args(Heads), "--heads")
    require_choice(order, get_args(ListOrder), "--order")
    _learn_sequence(request, SequenceShape("go", heads, request.devices, width=32, order=order), placements)


def _learn_sequence(request: LearnRequest, shape: SequenceShape, placements: int) -> None:
    """Train a policy of a shape, and report it."""
    from onnxplace_learned.policies.sequence_learning import SequenceSettings
    from onnxplace_learned.policy_training.sequence_training import SequenceLearnOptions, SequenceTraining

    settings = SequenceSettings.of(shape.kind, request.seed, placements)
    options = SequenceLearnOptions(
        shape=shape, settings=settings, seconds=request.seconds, updates=request.updates, threads=request.threads
    )
    graphs, result = _train(SequenceTraining, request, options)
    point = min(result.points, key=lambda item: item.validation_cost)
    quality = (
        f"unseen graphs: step {point.validation_cost:.4f} of one device, better of m-etf and one device "
        f"{point.fallback_cost:.4f} (update {point.updates})"
    )
    report_training(request, graphs, result, unit="updates", quality=quality)
