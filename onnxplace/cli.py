"""The command line. It parses, calls the library, prints; heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from onnxplace.errors import FeedError, OnnxplaceError, UsageError, nearest

if TYPE_CHECKING:
    from onnxplace.api import Compiled
    from onnxplace.bundle import Bundle
    from onnxplace.state import Diagnostic

as_json = click.option("--json", "json_", is_flag=True, help="Print one JSON object on stdout and nothing else there.")
inputs_option = click.option("--inputs", type=click.Path(path_type=Path), metavar="F.npz", help="Real inputs, by name.")
runtime_option = click.option(
    "--runtime", default="onnxruntime", show_default=True, metavar="NAME", help="`onnxplace runtimes` lists them."
)
seed_option = click.option(
    "--seed", default=0, callback=lambda *said: _seed(said[-1]), show_default=True, help="For inputs that are drawn."
)
shape_option = click.option("--shape", metavar="batch=8,seq=128", default="", help="Values for symbolic dimensions.")


def _seed(value: int) -> int:
    if value < 0:
        raise UsageError("U012", f"a seed cannot be {value}", where="--seed", hint="give 0 or more")
    return value


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="onnxplace")
def cli() -> None:
    """Split an ONNX model over several devices, and run the parts together.

    Exit codes: 0 done, 1 the answer is no, 2 bad usage or input, 3 infeasible, 4 a failure while running, 130 or 143
    interrupted.
    """


@cli.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Where the bundle goes [MODEL.bundle]."
)
@click.option("--devices", metavar="cuda:0,cpu:0", help="Default: every GPU found, else cpu:0,cpu:1.")
@click.option("--target", type=click.Path(path_type=Path), metavar="F.toml", help="Devices and links from a file.")
@click.option("--max-memory", metavar="16GiB", help="Per device; or cuda:0=16GiB,cpu:0=64GiB.")
@shape_option
@inputs_option
@click.option("--costs", type=click.Path(path_type=Path), metavar="F.json", help="Costs measured elsewhere or before.")
@click.option("--placer", metavar="NAME", help="`onnxplace passes` lists them  [default: m-etf]")
@click.option(
    "--pipeline", metavar="TEXT", help="All passes, such as 'optimize,profile{repeat=5},coplace,m-etf,split,emit'."
)
@click.option(
    "--device-map",
    type=click.Path(path_type=Path),
    metavar="F.json",
    help='Your own placement: {"encoder.*": "cpu:0"}.',
)
@click.option(
    "--colocate", multiple=True, metavar="REGEX", help="Nodes whose names match share a device; may be repeated."
)
@seed_option
@click.option("--strict", is_flag=True, help="Fail instead of leaving a requested device unused.")
@click.option("--force", is_flag=True, help="Replace the bundle if it exists.")
@as_json
def compile(  # noqa: A001
    model: Path,
    json_: bool,
    target: Path | None,
    shape: str,
    inputs: Path | None,
    placer: str | None,
    pipeline: str | None,
    **options: Any,
) -> None:
    """Profile MODEL, place it, split it, and write a bundle."""
    from onnxplace.api import DEFAULT_PLACER, compile_model
    from onnxplace.feeds import read_npz
    from onnxplace.target import read_target

    if placer and pipeline:
        raise UsageError("U044", "--placer and --pipeline exclude each other", hint="name the placer in the pipeline")
    with _progress(json_) as observer:
        compiled = compile_model(
            model,
            target=read_target(target) if target else None,
            shape=parse_shape(shape),
            inputs=read_npz(inputs) if inputs else None,
            placer=placer or DEFAULT_PLACER,
            pipeline=pipeline,
            observer=observer,
            **options,
        )
    _say(compiled.diagnostics)
    if json_:
        _print_json(_compiled_json(compiled))
    else:
        from onnxplace.report import compile_summary

        click.echo(compile_summary(compiled.bundle))


def _compiled_json(compiled: Compiled) -> dict[str, Any]:
    manifest = compiled.bundle.manifest
    return {
        "bundle": str(compiled.bundle.path),
        "model": manifest.model,
        "placer": manifest.placer,
        "pipeline": compiled.pipeline,
        "predicted": manifest.predicted.model_dump(),
        "devices": [device.model_dump() for device in manifest.devices],
        "segments": len(manifest.segments),
        "transfers": manifest.transfers,
        "transfer_bytes": manifest.transfer_bytes,
        "passes": [{"name": timing.name, "seconds": timing.seconds} for timing in compiled.timings],
        "diagnostics": [vars(note) for note in compiled.diagnostics],
    }


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@inputs_option
@click.option("--outputs", type=click.Path(path_type=Path), metavar="F.npz", help="Write the outputs there.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="How often to run.")
@shape_option
@runtime_option
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="F.json", help="Write a timeline for Perfetto or Chrome."
)
@seed_option
@as_json
def run(
    bundle: Path,
    inputs: Path | None,
    outputs: Path | None,
    repeat: int,
    shape: str,
    runtime: str,
    trace: Path | None,
    seed: int,
    json_: bool,
) -> None:
    """Run BUNDLE, on random inputs unless real ones are given."""
    from statistics import median

    import numpy as np

    from onnxplace.api import InferenceSession, load
    from onnxplace.files import write_file

    opened = load(bundle)
    feeds = _feeds(opened, inputs, shape, seed)
    with InferenceSession(opened, runtime=runtime, trace=trace is not None) as session:
        result = session.submit(feeds).result()
        if outputs and not result.outputs:
            raise _computes_nothing(runtime, "--outputs")
        taken = [session.submit(feeds).result().seconds for _ in range(repeat - 1)]
        if trace:
            session.run(None, feeds)
            write_file(trace, lambda stream: stream.write(json.dumps(session.trace()).encode()))
    if outputs:
        _write_npz(outputs, result.outputs)
    seconds = median(taken) if taken else result.seconds
    summary = {
        name: {
            "dtype": str(getattr(v, "dtype", type(v).__name__)),
            "shape": list(np.shape(v) if hasattr(v, "shape") else [len(v or ())]),
        }
        for name, v in result.outputs.items()
    }
    if json_:
        _print_json({"bundle": str(bundle), "runtime": runtime, "seconds": seconds, "runs": repeat, "outputs": summary})
    else:
        from onnxplace.report import milliseconds

        for name, about in summary.items():
            click.echo(f"{name}  {about['dtype']} {about['shape']}")
        click.echo(
            f"{'predicted' if runtime == 'simulated' else 'took'} {milliseconds(seconds)}"
            + (f" (median of {repeat - 1} after the first)" if repeat > 1 else _first_run(runtime))
        )


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="MODEL", help="Default: the bundle's own uncut copy."
)
@inputs_option
@shape_option
@runtime_option
@seed_option
@as_json
def verify(
    bundle: Path, against: Path | None, inputs: Path | None, shape: str, runtime: str, seed: int, json_: bool
) -> None:
    """Run the same inputs through BUNDLE and the unsplit model; exit 1 if they differ."""
    from onnxplace.api import InferenceSession, load
    from onnxplace.compare import reference
    from onnxplace.compare import verify as compare
    from onnxplace.machine import cores

    opened = load(bundle, "all")
    feeds = _feeds(opened, inputs, shape, seed)
    want = reference(opened, against, cores())
    with InferenceSession(opened, runtime=runtime) as session:
        if not session.submit(feeds).result().outputs:
            raise _computes_nothing(runtime, "verify")
        found = compare(lambda f: session.submit(f).result().outputs, want, feeds, [o.name for o in opened.outputs])
    equal = all(item.equal for item in found)
    if json_:
        _print_json({"equal": equal, "outputs": [_finite(vars(item)) for item in found]})
    else:
        for item in found:
            click.echo(
                f"{'equal ' if item.equal else 'DIFFERS'} {item.name}  max abs error {item.max_abs_error:.3g}, "
                f"relative to its largest value {item.max_rel_error:.3g}"
            )
    if not equal:
        raise SystemExit(1)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="MODEL", help="Default: the bundle's own uncut copy."
)
@inputs_option
@shape_option
@click.option(
    "--repeat", default=20, show_default=True, type=click.IntRange(1), help="Rounds, after two for warming up."
)
@click.option("--max-ratio", type=float, metavar="R", help="Exit 1 if the bundle takes more than R times the model.")
@seed_option
@as_json
def bench(
    bundle: Path,
    against: Path | None,
    inputs: Path | None,
    shape: str,
    repeat: int,
    max_ratio: float | None,
    seed: int,
    json_: bool,
) -> None:
    """Time BUNDLE beside one session with all cores and one session on a single device's cores, in turn."""
    from onnxplace.api import InferenceSession, load
    from onnxplace.compare import alternate, reference
    from onnxplace.machine import cores

    opened = load(bundle)
    feeds = _feeds(opened, inputs, shape, seed)
    largest = max((device.cores for device in opened.target.devices if device.kind == "cpu"), default=len(cores()))
    whole, one = reference(opened, against, cores()), reference(opened, against, cores()[:largest])
    with InferenceSession(opened) as session:
        times = alternate(
            {
                "bundle": lambda: session.run(None, feeds),
                "model": lambda: whole(feeds),
                "one_device": lambda: one(feeds),
            },
            repeat,
        )
    ratio = times["bundle"].median_seconds / times["model"].median_seconds
    predicted = opened.manifest.predicted
    if json_:
        _print_json(
            {
                **{name: vars(item) for name, item in times.items()},
                "ratio": ratio,
                "ratio_one_device": times["bundle"].median_seconds / times["one_device"].median_seconds,
                "predicted_seconds": predicted.step_seconds,
                "predicted_one_device_seconds": predicted.single_device_seconds,
            }
        )
    else:
        from onnxplace.report import bench_summary

        click.echo(bench_summary(opened, times))
    if max_ratio is not None and ratio > max_ratio:
        click.echo(f"the bundle takes {ratio:.3f} times the model, more than {max_ratio}", err=True)
        raise SystemExit(1)


@cli.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="F.toml", help="Write the default target there."
)
@as_json
def devices(output: Path | None, json_: bool) -> None:
    """Show what is here and what ONNX Runtime can use of it."""
    from onnxplace import machine
    from onnxplace.files import write_file
    from onnxplace.report import devices_summary
    from onnxplace.target import target_text

    target = machine.local_target()
    if output:
        text = target_text(target.with_all_links())
        write_file(output, lambda stream: stream.write(text.encode()))
    about = machine.describe()
    if json_:
        _print_json({**about, "default": [vars_of(device) for device in target.devices]})
    else:
        click.echo(devices_summary(about, target))


@cli.command()
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--placer", default="m-etf", show_default=True, metavar="NAME", help="`onnxplace passes` lists them.")
@click.option("--devices", type=click.IntRange(1), metavar="N", help="Default: as many as the graph names.")
@click.option("--max-memory", metavar="16GiB", help="Per device; default: what the graph says.")
@click.option("--links", type=click.Choice(["duplex", "parallel", "sequential"]), default="duplex", show_default=True)
@click.option(
    "--groups",
    type=click.Choice(["none", "given", "coplace", "given+coplace"]),
    default="given+coplace",
    show_default=True,
    help="Nodes that must share a device: the graph's own, those with a single reader (Baechi), both, or none.",
)
@click.option("--fuse/--no-fuse", default=True, show_default=True, help="Contract groups before placing.")
@click.option(
    "--placement", type=click.Path(path_type=Path), metavar="F.json", help="Score this: {node id: device id}."
)
@as_json
def place(
    graph: Path,
    placer: str,
    devices: int | None,
    max_memory: str | None,
    links: Any,
    groups: Any,
    fuse: bool,
    placement: Path | None,
    json_: bool,
) -> None:
    """Place the cost graph GRAPH (JSON, or .json.gz); no ONNX needed."""
    from onnxplace import placing
    from onnxplace.cost_graph import read_cost_graph
    from onnxplace.report import placed_summary
    from onnxplace.target import parse_bytes

    memory = parse_bytes(max_memory) if max_memory else None
    asked = placing.with_devices(read_cost_graph(graph), devices, memory)
    if placement:
        found = placing.evaluate(asked, placing.read_placement(placement), links=links)
    else:
        found = placing.place(asked, placer, links=links, groups=groups, fuse=fuse)
    if json_:
        entries = {**vars(found), "peak_bytes": found.peak_bytes.tolist(), "placement": dict(found.placement)}
        _print_json({**entries, "passes": [vars(timing) for timing in found.passes]})
    else:
        click.echo(placed_summary(found, asked))


def vars_of(device: object) -> dict[str, Any]:
    """Return a frozen record as a plain dictionary."""
    from dataclasses import asdict

    return asdict(device)  # type: ignore[call-overload, no-any-return]


@cli.command()
@click.argument("name", required=False)
@as_json
def passes(name: str | None, json_: bool) -> None:
    """List the passes, built in and plugged in; with NAME, show its options."""
    _list_entries("passes", name, json_)


@cli.command()
@click.argument("name", required=False)
@as_json
def runtimes(name: str | None, json_: bool) -> None:
    """List the runtimes, built in and plugged in."""
    _list_entries("runtimes", name, json_)


def _list_entries(kind: Any, name: str | None, json_: bool) -> None:
    from onnxplace.registry import entries, find
    from onnxplace.report import pass_help, table

    if name:
        found = find(kind, name)
        click.echo(json.dumps({"name": name, **pass_help(found)[1]}) if json_ else pass_help(found)[0])
        return
    known = entries(kind)
    if json_:
        _print_json({kind: [vars_of(entry) for entry in known.values()]})
    else:
        click.echo(table(("name", ""), [(entry.name, entry.summary) for entry in known.values()], left=2))


def _first_run(runtime: str) -> str:
    return "" if runtime == "simulated" else " (the first run; try --repeat 20)"


def parse_shape(text: str) -> dict[str, int]:
    """Read `batch=8,seq=128`; raises UsageError."""
    sizes = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, size = item.partition("=")
        if not key or not size.strip().isdecimal():
            raise UsageError("U011", f"not a dimension: {item!r}", where="--shape", hint="write it as batch=8,seq=128")
        sizes[key.strip()] = int(size)
    return sizes


def _feeds(bundle: Bundle, inputs: Path | None, shape: str, seed: int) -> Mapping[str, Any]:
    """Return the user's inputs, else random ones of the shapes the bundle was compiled with, or of --shape."""
    from onnxplace.feeds import check_feeds, dimension_keys, random_feeds, read_npz

    sizes = parse_shape(shape)
    known = {key for item in bundle.inputs for key, size in dimension_keys(item) if size is None}
    for key in sizes:
        if key not in known:
            hint = nearest(key, sorted(known)) if known else "all its dimensions are fixed"
            raise FeedError("M022", f"the model has no symbolic dimension {key!r}", where="--shape", hint=hint)
    if inputs:
        return check_feeds(read_npz(inputs), bundle.inputs)
    return random_feeds(bundle.inputs, {**bundle.manifest.dimensions, **sizes}, seed)


def _say(diagnostics: Sequence[Diagnostic]) -> None:
    for note in diagnostics:
        place = f"{note.where}: " if note.where else ""
        click.echo(
            f"note[{note.code}] {place}{note.message}" + (f"\n  hint: {note.hint}" if note.hint else ""), err=True
        )


def _print_json(data: Mapping[str, Any]) -> None:
    click.echo(json.dumps(data, indent=1, default=str))


def _write_npz(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write outputs by name, whatever the names are; sequences as one array per element, `name.0`, `name.1`."""
    import zipfile

    import numpy as np

    arrays: dict[str, Any] = {}
    for name, value in outputs.items():
        parts = {f"{name}.{i}": part for i, part in enumerate(value)} if isinstance(value, list) else {name: value}
        arrays |= {key: np.asarray(part) for key, part in parts.items() if part is not None}

    def fill(stream: BinaryIO) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for key, array in arrays.items():
                text = array.astype(str) if array.dtype == object else array
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, text, allow_pickle=False)

    from onnxplace.files import write_file

    write_file(path, fill)


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in which numbers that JSON does not have are None."""
    return {key: None if value in (float("inf"), float("-inf")) else value for key, value in entry.items()}


def _computes_nothing(runtime: str, what: str) -> UsageError:
    return UsageError("U045", f"runtime {runtime!r} computes no outputs", where=what, hint="use --runtime onnxruntime")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show the pass at work on stderr, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("reading the model") as status:
        yield lambda name, index, count: status.update(f"[{index + 1}/{count}] {name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nobody sees a traceback for their own mistake."""
    try:
        result = cli.main(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except OnnxplaceError as problem:
        click.echo(str(problem), err=True)
        return problem.exit_code
    except click.ClickException as problem:
        problem.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing half-written was left", err=True)
        return 130
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 4
    except MemoryError:
        click.echo("error[X010] out of memory\n  hint: close other programs, or use a machine with more", err=True)
        return 4
    except BrokenPipeError:
        _abandon_stdout()
        return 0
    except OSError as problem:
        from onnxplace.files import disk_error

        click.echo(str(disk_error(problem, str(problem.filename or "a file"))), err=True)
        return 4


def _abandon_stdout() -> None:
    """Whoever read our output has gone; leave nothing in the buffer that Python would try to write at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry() -> None:
    """Console script. A request to terminate unwinds like Ctrl-C, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = main()
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()
    sys.exit(code)
