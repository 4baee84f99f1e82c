"""Options, checks and output that several commands share."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import (
    BUNDLE_PATH,
    PATH,
    complete_devices,
    complete_machines,
    complete_placers,
    complete_runtimes,
)
from onnxplace.cli.help import take_runtime_options
from onnxplace.cli.terminal import (
    as_json as as_json,
    describe_note as describe_note,
    format_json as format_json,
    is_quiet,
    is_terminal,
    is_verbose,
    print_aside,
    print_json as print_json,
    print_result as print_result,
    print_text as print_text,
    show_progress as show_progress,
)
from onnxplace.errors import NoteWarning, UsageError, format_name, format_value
from onnxplace.utils.files import require_writable, write_file

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import Bundle
    from onnxplace.errors import Diagnostic
    from onnxplace.runtime.interface import CopyStatus


class FiniteNumber(click.FloatRange):
    """A number, in a range if that is given; click's own types take `nan` for one of any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or end the command."""
        number: float = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number.", param, ctx)


# Any int64. The model limits sizes further.
_SIZE = re.compile(r"[0-9]{1,18}")
# Sizes with a weight behind them.
_WEIGHTED = re.compile(r"(.*=\s*[0-9]+)\s*=\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*")


def stack(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator for several: the first one is outermost, as if they were written one below the other."""
    return lambda command: reduce(lambda inner, decorate: decorate(inner), reversed(decorators), command)


against_option = click.option("--against", type=PATH, metavar="MODEL", help="Default: the unsplit model in the bundle.")
inputs_option = click.option("--inputs", type=PATH, metavar="F.npz", help="Real inputs by name, from numpy.savez.")
_RUNTIME_OPTIONS = (
    click.option(
        "--runtime",
        default="onnxruntime",
        show_default=True,
        metavar="NAME",
        shell_complete=complete_runtimes,
        help="`onnxplace runtimes` lists them.",
    ),
    click.option("--fallback", metavar="cpu:0", help="Takes over the segments of a device that is lost."),
)
seed_option = click.option(
    "--seed",
    default=0,
    callback=lambda *arguments: _check_seed(arguments[-1]),
    show_default=True,
    help="Seed of all random numbers.",
)
objective_option = click.option(
    "--objective",
    type=click.Choice(["latency", "worst-ratio", "throughput", "fit", "step"]),
    default="latency",
    show_default=True,
    help="Least step time, least worst ratio to the best plan of each of several sizes, most steps per second, "
    "least traffic of placements that fit, or least training step.",
)
budget_option = click.option(
    "--budget", type=FiniteNumber(), metavar="SECONDS", help="Time limit of the search, more than 0  [default: 2]"
)
placer_option = click.option(
    "--placer", metavar="NAME", shell_complete=complete_placers, help="`onnxplace passes` lists them  [default: auto]"
)
devices_option = click.option(
    "--devices", shell_complete=complete_devices, metavar="cuda:0,cpu:0", help="Default: all GPUs, else cpu:0,cpu:1."
)
target_output_option = click.option("-o", "--output", type=PATH, metavar="F.toml", help="Write the target to a file.")
# Given twice, it is one text, in which a dimension may be given once.
shape_option = click.option(
    "--shape",
    multiple=True,
    callback=lambda *arguments: ",".join(arguments[-1]),
    metavar="batch=8,seq=128",
    help="Sizes of symbolic dimensions.",
)
# Those of commands that read a model and compare ways to run it.
model_options = stack(
    devices_option,
    click.option(
        "--target",
        type=PATH,
        metavar="F.toml",
        help="Devices and links from a file, of this or another machine (docs/target.md).",
    ),
    click.option(
        "--providers",
        metavar="NAMES",
        default="",
        help="Further execution providers for the same hardware, such as openvino; each segment gets the fastest.",
    ),
    click.option(
        "--max-memory",
        metavar="16GiB",
        help="Limit of each device; or cuda:0=16GiB,cpu:0=64GiB,host=64GiB  [default: 90 % of the free memory]",
    ),
    click.option(
        "--shape",
        multiple=True,
        metavar="batch=8,seq=128",
        help="Sizes of symbolic dimensions; repeat it for several kinds of requests, batch=1=0.1 for a rare one.",
    ),
    click.option(
        "--fixed-sizes", is_flag=True, help="Take the sizes of --shape alone: NPUs run more of the model then."
    ),
    inputs_option,
    click.option(
        "--state",
        multiple=True,
        metavar="OUT=IN",
        help="Keep output OUT on its device as input IN of the next call; 'present.*=past.*' for many; repeat.",
    ),
    click.option(
        "--llm", is_flag=True, help="MODEL is a decoder with a cache: recognise its states and sizes (docs/models.md)."
    ),
    click.option("--no-cache", is_flag=True, help="Measure all costs again."),
    click.option(
        "--effort",
        type=click.Choice(["low", "default", "high"]),
        default="default",
        show_default=True,
        help="low: estimates and little search; high: all is measured as a whole, and searched for all of the time.",
    ),
)


def with_runtime(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--runtime` and the options of the runtimes; the command gets them as `session_options`.

    These are arguments of `InferenceSession`.
    """

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        session_options = {name: options.pop(name) for name in ("runtime", "fallback")} | take_runtime_options(options)
        with warnings.catch_warnings():
            # `note_left_out_copies` reports them at the end.
            warnings.filterwarnings("ignore", message=".* is left out:", category=RuntimeWarning)
            command(*arguments, session_options=session_options, **options)

    return stack(*_RUNTIME_OPTIONS)(run)  # type: ignore[no-any-return]


def with_operator_libraries(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option `--custom-op-library`.

    Its libraries are in use while the command runs.
    """

    @wraps(command)
    def run(*arguments: Any, custom_op_library: tuple[Path, ...], **options: Any) -> None:
        if not custom_op_library:
            command(*arguments, **options)
            return
        from onnxplace.machine.ort_sessions import use_custom_operators

        with use_custom_operators(custom_op_library):
            command(*arguments, **options)

    option = click.option(
        "--custom-op-library",
        multiple=True,
        type=PATH,
        metavar="FILE",
        help="A shared library with operators that ONNX Runtime lacks; may be repeated.",
    )
    return option(run)


# Those of commands that run a bundle on inputs.
bundle_options = stack(
    click.argument("bundle", type=BUNDLE_PATH),
    inputs_option,
    shape_option,
    with_runtime,
    seed_option,
    with_operator_libraries,
    as_json,
)


def with_machine(*, multiple: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds `--machine`, which the command gets, and `--save-target`, written after it."""
    help_text = "Devices and links by name, as `onnxplace machines` lists them"
    machine_options = stack(
        click.option(
            "--machine",
            multiple=True,
            metavar="8xH100-NVLink",
            shell_complete=complete_machines,
            help=f"{help_text}{'; may be repeated' if multiple else ''}.",
        ),
        click.option("--save-target", type=PATH, metavar="F.toml", help="Write the machine to a target file."),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(*arguments: Any, machine: tuple[str, ...], save_target: Path | None, **options: Any) -> None:
            if len(machine) > 1 and not multiple:
                hint = "`onnxplace plan` compares several"
                raise UsageError("U042", "expected one --machine", where=" ".join(machine), hint=hint)
            content = _describe_machine(machine).encode() if save_target else b""
            if save_target:
                require_writable(save_target)
            command(*arguments, machine=machine if multiple else next(iter(machine), None), **options)
            if save_target:
                write_file(save_target, lambda stream: stream.write(content))

        return machine_options(run)  # type: ignore[no-any-return]

    return decorate


def _describe_machine(names: tuple[str, ...]) -> str:
    """Return the target file of a machine, with the sources of its figures; raises UsageError unless there is one."""
    from onnxplace.target.machines import parse_machine
    from onnxplace.target.target_file import format_target

    if len(names) != 1:
        raise UsageError("U042", "--save-target writes one machine", hint="name it: --machine 8xH100-NVLink")
    machine = parse_machine(names[0])
    sources = [f"# {item.source} {item.basis}".rstrip() for item in machine.parts]
    heading = f"# {machine.name}: published figures, none measured here"
    return "\n".join([heading, *dict.fromkeys(sources), format_target(machine.to_target(), compact=True)])


def _check_seed(value: int) -> int:
    if value < 0:
        message = f"expected a seed of 0 or more, got {value}"
        raise UsageError("U005", message, where="--seed", hint="omit it for seed 0")
    return value


def parse_shape(text: str) -> dict[str, int]:
    """Read `batch=8,seq=128`; a comma in parentheses is part of a name.

    >>> parse_shape("batch=8, min(a, b)=2")
    {'batch': 8, 'min(a, b)': 2}
    """
    return {key: sizes[0] for key, sizes in _parse_sizes(text, max_sizes=1).items()}


def parse_sizes(texts: Sequence[str]) -> list[tuple[dict[str, tuple[int, ...]], float]]:
    """Read each `batch=1,4,8,seq=128=0.1`: dimensions, which may have several sizes, and a weight, by default 1.

    >>> parse_sizes(["batch=1,4, seq=128", "batch=8=0.1"])
    [({'batch': (1, 4), 'seq': (128,)}, 1.0), ({'batch': (8,)}, 0.1)]
    """
    matches = [(text, _WEIGHTED.fullmatch(text)) for text in texts]
    return [(_parse_sizes(match[1] if match else text), float(match[2]) if match else 1.0) for text, match in matches]


def _parse_sizes(text: str, max_sizes: int = 1024) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {}
    for item in filter(None, (part.strip() for part in re.split(r",(?![^()]*\))", text))):
        key, _, size = item.rpartition("=")
        key, size = key.strip(), size.strip()
        last = next(reversed(sizes), "")
        if last and "=" not in item and _SIZE.fullmatch(size) and len(sizes[last]) < max_sizes:
            sizes[last] += (int(size),)
            continue
        if not key or not _SIZE.fullmatch(size):
            hint = "write dimensions as batch=8,seq=128; a weight, how often it comes, follows as batch=8,seq=128=0.1"
            raise UsageError("M022", f"not a dimension: {format_value(item)}", where="--shape", hint=hint)
        if key in sizes:
            raise UsageError("M022", f"dimension {key!r} is given twice", where="--shape", hint="give it once")
        sizes[key] = (int(size),)
    return sizes


def announce_loop_compilation(quiet: bool) -> None:
    """Report on a terminal that loops are being compiled; nothing if `quiet`."""
    if quiet or is_quiet() or not is_terminal():
        return
    from onnxplace.utils.jit import on_compiling

    on_compiling(
        lambda: print_text("compiling loops for this machine, once: they are kept for later commands", err=True)
    )


def print_notes(diagnostics: Sequence[Diagnostic]) -> None:
    """Print notes on stderr, a line for each; all of their text with `--verbose`, nothing with `--quiet`.

    They come after the result. On a terminal, a line is no longer than it is wide.
    """
    is_cut = False
    for note in () if is_quiet() else diagnostics:
        place = f"{format_name(note.where)}: " if note.where else ""
        text = f"note[{note.code}] {place}{note.message}"
        if is_verbose():
            text += f"\n  hint: {note.hint}" if note.hint else ""
        elif is_terminal() and len(text) > (columns := get_terminal_size().columns):
            text = f"{text[: columns - 3]}..."
        is_cut |= bool(note.hint) or text.endswith("...")
        print_aside(text)
    if is_cut and is_terminal() and not is_verbose():
        print_hint("  more about notes: -v, or onnxplace explain CODE")


@contextmanager
def show_session_notes() -> Iterator[None]:
    """Print the notes of sessions at work, which come as warnings, as notes."""
    show = warnings.showwarning

    def show_note(message: Warning | str, *others: Any, **options: Any) -> None:
        if isinstance(message, NoteWarning):
            print_notes([message.note])
        else:
            show(message, *others, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("always", NoteWarning)
        warnings.showwarning = show_note
        yield


def print_hint(text: str) -> None:
    """Print a human-readable line on stderr, unless they want errors only."""
    if not is_quiet():
        print_aside(text)


def note_core_shortage(bundle: Bundle, runtime: str = "onnxruntime") -> None:
    """Print a note if this machine has too few cores for the bundle."""
    from onnxplace.measure.host_nodes import find_core_shortage

    if runtime != "simulated" and (note := find_core_shortage(bundle.manifest)):
        print_notes([note])


def note_left_out_copies(copies: Sequence[CopyStatus]) -> None:
    """Print a note for each copy of a bundle that was left out."""
    from onnxplace.errors import Diagnostic

    notes = []
    for index, copy in enumerate(copies):
        if copy.failures:
            times = "once" if copy.failures == 1 else f"{copy.failures} times"
            message = f"copy {index} on {copy.name} was left out {times}, last: {copy.last_failure}"
            hint = "it is open again" if copy.is_open else "the others took its requests; look at its hosts"
            notes.append(Diagnostic("K014", message, hint=hint))
    print_notes(notes)


def suggest_command(path: Path, refused_by: str) -> str:
    """Return a hint at the command that takes a path, or nothing.

    It is a guess from names and folders. `refused_by` is the command that does not take it.
    """
    from onnxplace.bundle.bundle import MANIFEST_FILE

    try:
        if path.is_dir():
            return _suggest_for_folder(path, MANIFEST_FILE)
        if path.name == MANIFEST_FILE:
            return f"name its folder: {path.parent}"
        if not path.is_file():
            return ""
    except (OSError, ValueError):
        return ""
    if path.suffix == ".onnx" and refused_by not in ("compile", "run"):  # where bundles are opened, the hint says more
        return f"it is a model: compile it with `onnxplace compile {path}`"
    if path.suffix in (".npz", ".npy"):
        return "it holds arrays: pass it to --inputs"
    if path.name.endswith((".json", ".json.gz", ".graphml")) and refused_by != "place":
        return f"if it is a cost graph: `onnxplace place {path}`"
    return ""


def _suggest_for_folder(path: Path, manifest: str) -> str:
    if (path / manifest).is_file():
        return f"it is a bundle, compiled already: `onnxplace run {path}`; to compile again, name its model"
    if (path / "saved_model.pb").is_file():
        return f"it is a TensorFlow model: python -m tf2onnx.convert --saved-model {path} --output model.onnx"
    models, bundles = sorted(path.glob("*.onnx")), sorted(file.parent for file in path.glob(f"*/{manifest}"))
    contents = [*models[:1], *bundles[:1]]
    return f"name a path in it: {' or '.join(str(item) for item in contents)}" if contents else ""
