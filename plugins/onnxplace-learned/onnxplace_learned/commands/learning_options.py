"""Options, graphs, progress and output that the commands `onnxplace learn POLICY` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.shared_options import (
    announce_loop_compilation,
    as_json,
    parse_shape,
    print_json,
    print_text,
    seed_option,
    shape_option,
    with_machine,
)
from onnxplace.cli.terminal import show_progress
from onnxplace.errors import UsageError, format_count, suggest_nearest

if TYPE_CHECKING:
    from onnxplace.target.target import Target
    from onnxplace_learned.policy_training.learning_graphs import LearningGraph
    from onnxplace_learned.policy_training.training_loop import LearnResult

# No target has more devices.
MAX_DEVICES = 256
FAMILY_HELP = "`onnxplace learn families` lists them."

nodes_option = click.option(
    "--nodes", type=click.IntRange(1), default=200, show_default=True, help="Approximate number of nodes per graph."
)
backward_option = click.option("--backward", is_flag=True, help="Add backward passes; half of the nodes are theirs.")


@dataclass(frozen=True)
class LearnRequest:
    """The options that all policies share."""

    families: tuple[str, ...]
    source: Path | None
    """A folder of graphs, or one graph."""
    count: int
    nodes: int
    backward: bool
    shape: Mapping[str, int]
    """Sizes of symbolic dimensions of models."""
    devices: int
    """How many."""
    target: Target | None
    """The devices that the user named; None for a number of devices."""
    seconds: float
    updates: int
    threads: int
    seed: int
    resume: bool
    output: Path
    json: bool

    @property
    def label(self) -> str:
        """Return what to call the graphs."""
        return ", ".join(self.families) or str(self.source)


def learning_options(
    *, limit: str = "updates", count: int = 32, devices: int = 2, several: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that all policies share; the command gets them as a `LearnRequest`.

    Args:
        limit: The option that limits the number of updates.
        count: The default number of graphs.
        devices: The default number of devices.
        several: Whether there may be several families; then the number of graphs is that of each, and without a family
            all are taken.
    """
    options = [
        *_graph_options(count, devices, several),
        click.option("--seconds", type=click.FloatRange(0), default=0.0, help="Time limit of the training."),
        click.option(
            f"--{limit}", "updates", type=click.IntRange(0), default=0,
            help="Number of updates of the policy, for a repeatable result.",
        ),
        click.option("--threads", type=click.IntRange(1), default=1, show_default=True,
                     help="Number of torch threads."),
        seed_option,
        click.option("--resume", is_flag=True, help="Continue from the checkpoint next to the policy."),
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="F.safetensors",
            help="The policy.",
        ),
        as_json,
    ]  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(
            *,
            family: Any,
            devices: str,
            target: Path | None,
            machine: str | None,
            shape: str,
            json_: bool,
            **given: Any,
        ) -> None:
            from onnxplace_learned.graphs.architectures import ARCHITECTURES

            shared = {name: given.pop(name) for name in SHARED_OPTIONS if name in given}
            _require_policy_name(shared["output"])
            number, chosen = _choose_devices(devices, target, machine)
            families = tuple(family) if several else (family,) if family else ()
            if several and not families and shared["source"] is None:
                families = tuple(ARCHITECTURES)
            request = LearnRequest(
                families=families,
                devices=number,
                target=chosen,
                shape=parse_shape(shape),
                json=json_,
                **{"backward": False, **shared},
            )
            command(request, **given)

        decorated: Callable[..., None] = run
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


# Options that become fields of LearnRequest under their own names.
SHARED_OPTIONS = (
    "source", "count", "nodes", "backward", "seconds", "updates", "threads", "seed", "resume", "output",
)  # fmt: skip


def _graph_options(count: int, devices: int, several: bool) -> list[Callable[..., Any]]:
    """Return the options that say what to learn from, and for which devices."""
    all_of_them = "May be repeated. Default: all architectures. " if several else ""
    of_count = "Graphs of each family, size and number of devices." if several else "How many graphs of the family."
    return [
        click.option("--family", multiple=several, metavar="NAME", help=f"{all_of_them}{FAMILY_HELP}"),
        click.option(
            "--graphs",
            "source",
            type=click.Path(path_type=Path),
            metavar="PATH",
            help="A folder of cost graphs (JSON, GraphML) and ONNX models, or one of them, instead of a family.",
        ),
        click.option("--count", type=click.IntRange(1), default=count, show_default=True, help=of_count),
        nodes_option,
        shape_option,
        *([] if several else [backward_option]),
        click.option(
            "--devices",
            default=str(devices),
            show_default=True,
            metavar="N|NAMES",
            help="How many, or names such as cpu:0,cpu:1 of this machine.",
        ),
        click.option(
            "--target",
            type=click.Path(path_type=Path),
            metavar="F.toml",
            help="Devices and links from a file instead (docs/target.md).",
        ),
        with_machine(),
    ]


def _choose_devices(devices: str, target: Path | None, machine: str | None) -> tuple[int, Target | None]:
    """Return the number of devices, and the target unless only their number is given.

    Raises:
        UsageError: Devices are given in two ways.
        TargetError: A device, the file or the machine is wrong.
    """
    from onnxplace.driver.settings import require_one_target
    from onnxplace.machine.hardware import local_target
    from onnxplace.target.machines import parse_machine
    from onnxplace.target.target_file import read_target

    source = click.get_current_context().get_parameter_source("devices")
    require_one_target(devices if source is not None and source.name != "DEFAULT" else None, target, machine)
    named = read_target(target) if target is not None else parse_machine(machine).to_target() if machine else None
    if named is not None:
        return len(named.devices), named
    if devices.isascii() and devices.strip().isdecimal():
        number = int(devices) if len(devices.strip()) <= len(str(MAX_DEVICES)) else 0
        if not 1 <= number <= MAX_DEVICES:
            message = f"{devices.strip()} is not in the range 1<=x<={MAX_DEVICES}."
            raise click.BadParameter(message, param_hint="--devices")
        return number, None
    chosen = local_target(devices)
    return len(chosen.devices), chosen


def collect_graphs(request: LearnRequest, *, mixture: bool = False) -> list[LearningGraph]:
    """Return the graphs to learn from.

    Args:
        request: What the user asked for.
        mixture: Whether to draw several families, sizes and numbers of devices.

    Raises:
        UsageError: There is not one source, or not such a family; or sizes are given for a family.
        InputError: The folder or file has no graphs.
    """
    from onnxplace_learned.graphs.graph_sets import GraphSet
    from onnxplace_learned.policy_training.learning_graphs import draw_mixture, draw_problems, read_problems

    if (request.source is None) == (not request.families):
        message = "expected either --family or --graphs, got " + ("both" if request.families else "neither")
        raise UsageError("U042", message, hint=f"--family NAME: {FAMILY_HELP}")
    if request.shape and request.source is None:
        raise UsageError("U042", "--shape is for ONNX models, and families have none", hint="--graphs model.onnx")
    if request.source is not None:
        return read_problems(request.source, request.devices, request.target, request.shape)
    if mixture:
        return draw_mixture(request.families, request.count, request.nodes, request.devices, request.target)
    graphs = GraphSet(request.families[0], request.count, request.nodes, "train", request.backward)
    return draw_problems(graphs, request.devices, request.target)


def require_choice(value: str, choices: tuple[str, ...], option: str) -> None:
    """Raise UsageError unless a value is one of the choices."""
    if value not in choices:
        message = f"expected one of {', '.join(choices)}, got {value!r}"
        raise UsageError("U005", message, where=option, hint=suggest_nearest(value, choices))


def _require_policy_name(output: Path) -> None:
    """Raise UsageError unless a name ends in .safetensors, so that the other files get names of their own."""
    if output.suffix != ".safetensors":
        message = f"expected a file that ends in .safetensors, got {output.name!r}"
        raise UsageError("U032", message, where="--output", hint=f"{output.stem}.safetensors")


@contextmanager
def show_training(
    request: LearnRequest, describe: Callable[[Any], str] | None = None
) -> Iterator[Callable[[float, Any], None] | None]:
    """Show progress on stderr; yields an observer of points of the learning curve, which `describe` puts into words."""
    announce_loop_compilation(request.json)
    with show_progress(request.json, "learning") as display:
        text = describe or _describe_point
        yield (lambda share, point: display.advance(share, text(point))) if display else None


def _describe_point(point: Any) -> str:
    return f"update {point.updates}, unseen graphs {point.validation_cost:.4f}"


def report_training(
    request: LearnRequest,
    graphs: Sequence[LearningGraph],
    result: LearnResult,
    *,
    unit: str,
    quality: str,
) -> None:
    """Print what was learned.

    Args:
        request: What the user asked for.
        graphs: What was learned from.
        result: Points of the learning curve, and files.
        unit: What to call an update, in the plural.
        quality: A sentence on the best policy.
    """
    files = [str(path) for path in result.files]
    if request.json:
        best = min(result.points, key=lambda point: point.validation_cost)
        print_json({"graphs": len(graphs), "files": files, "best": vars(best), "points": len(result.points)})
        return
    last = result.points[-1]
    print_text(f"{request.label}: {format_count(len(graphs), 'graph')}, {last.updates} {unit} in {last.seconds:.0f} s")
    print_text(quality)
    print_text(f"written: {', '.join(files)}")
