"""The command `onnxplace serve`."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import BUNDLE_PATH
from onnxplace.cli.shared_options import (
    as_json,
    note_core_shortage,
    print_hint,
    print_json,
    print_notes,
    print_text,
    show_progress,
    with_operator_libraries,
    with_runtime,
)
from onnxplace.errors import Diagnostic, UsageError, format_names

if TYPE_CHECKING:
    import asyncio

    from onnxplace.bundle import Bundle
    from onnxplace.serving import Batching, Limits, ServedModel

# Names that URLs, metrics and clients take as they are.
_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


@click.command(short_help="Answer requests over HTTP and gRPC (KServe v2).")
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=BUNDLE_PATH)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all networks.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="For HTTP; 0: any.")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), metavar="PORT", help="For gRPC  [default: the next after --port]"
)
@click.option("--warmup", is_flag=True, help="Run each model on random inputs before the first request.")
@click.option(
    "--max-batch", default=1, show_default=True, metavar="ROWS",
    help="Join waiting requests up to this size, for models that are proven to allow it.",
)  # fmt: skip
@click.option(
    "--max-delay", default=2.0, show_default=True, metavar="MS", help="How long a request waits to be joined."
)
@click.option(
    "--max-in-flight", default=8, show_default=True, type=int, help="Requests, or joined batches, that run at a time."
)
@click.option("--max-queue", default=128, show_default=True, type=click.IntRange(0), help="Requests that wait.")
@click.option("--max-request", default="64MiB", show_default=True, metavar="SIZE", help="Size of a request.")
@click.option("--max-sequences", default=64, show_default=True, type=click.IntRange(1), help="Sequences with states.")
@click.option(
    "--timeout", default=60.0, show_default=True, type=click.FloatRange(0.001, 1e6), metavar="SECONDS",
    help="Time of a request; also what requests in flight get at the end.",
)  # fmt: skip
@with_runtime
@with_operator_libraries
@as_json
def serve(bundles: tuple[Path, ...], host: str, port: int, grpc_port: int | None, json_: bool, **options: Any) -> None:
    """Answer requests for BUNDLE..., each a path or NAME=PATH, until SIGTERM or Ctrl-C.

    The protocol is KServe v2 (Open Inference Protocol), which tritonclient speaks. Metrics for Prometheus are at
    /metrics. All limits are for each model.
    """
    from onnxplace.serving import ServedModels, format_address, listen, require_server_packages

    require_server_packages()
    paths = name_models(bundles)
    limits, batching = read_limits(options), read_batching(options)
    with ExitStack() as stack:
        listener = stack.enter_context(listen(host, port))
        port = listener.getsockname()[1]
        with listen(host, min(port + 1, 65535) if grpc_port is None else grpc_port) as probe:
            grpc_port = probe.getsockname()[1]
        models = open_models(paths, limits, batching, options, json_)
        address, grpc_address = format_address(host, port), format_address(host, grpc_port)

        def announce() -> None:
            described = {
                model.name: {"path": str(model.bundle.path), "max_batch": model.joined_rows} for model in models
            }
            if json_:
                print_json({"http": f"http://{address}", "grpc": grpc_address, "models": described})
                return
            print_text(f"{format_names(described, quoted=False)}: http://{address}/v2 and grpc://{grpc_address}")
            print_hint("SIGTERM or Ctrl-C ends the server after the requests in flight")

        import asyncio

        from onnxplace.serving import run_server

        async def run() -> None:
            stop = asyncio.Event()
            served = ServedModels(models)
            with stop_on_signals(asyncio.get_running_loop(), stop):
                await run_server(served, limits, listener, grpc_address, stop, announce)

        asyncio.run(run())


def name_models(bundles: tuple[Path, ...]) -> dict[str, Path]:
    """Return the path of each model by its name; raises UsageError for bad or repeated names.

    >>> name_models((Path("resnet.bundle"), Path("b=models/bert.bundle")))
    {'resnet': PosixPath('resnet.bundle'), 'b': PosixPath('models/bert.bundle')}
    """
    paths: dict[str, Path] = {}
    for item in bundles:
        given, found, rest = str(item).partition("=")
        path = Path(rest) if found and not item.exists() else item
        name = given if path is not item else path.resolve().name.removesuffix(".bundle")
        if not _MODEL_NAME.fullmatch(name):
            message = f"{name!r} cannot be the name of a model: expected letters, digits, '_', '-' and '.'"
            raise UsageError("U005", message, where=str(item), hint=f"choose one: onnxplace serve NAME={path}")
        if name in paths:
            message = f"two models have the name {name!r}"
            raise UsageError("U005", message, where=str(item), hint=f"choose another: onnxplace serve NAME={path}")
        paths[name] = path
    return paths


def read_limits(options: Mapping[str, Any]) -> Limits:
    """Return the limits that the options give; raises UsageError."""
    from onnxplace.serving import Limits, check_in_flight
    from onnxplace.target import parse_bytes

    return Limits(
        max_in_flight=check_in_flight(options["max_in_flight"], "--max-in-flight"),
        max_queue=options["max_queue"],
        max_request_bytes=parse_bytes(options["max_request"]),
        timeout_seconds=options["timeout"],
        max_sequences=options["max_sequences"],
    )


def read_batching(options: Mapping[str, Any]) -> Batching | None:
    """Return how requests are joined, None if they are not; raises UsageError."""
    from onnxplace.serving import Batching

    batching = Batching(options["max_batch"], options["max_delay"])
    return batching if batching.max_batch > 1 else None


def open_models(
    paths: Mapping[str, Path], limits: Limits, batching: Batching | None, options: Mapping[str, Any], json_: bool
) -> list[ServedModel]:
    """Open all bundles, and run them once if they are to be warm; closes those that are open after a failure."""
    from onnxplace.api import load
    from onnxplace.serving import require_servable

    bundles = {name: load(path) for name, path in paths.items()}
    for bundle in bundles.values():
        require_servable(bundle)
        note_core_shortage(bundle, options["session_options"]["runtime"])
    models: list[ServedModel] = []
    try:
        with show_progress(json_, "opening models") as observer:
            for name, bundle in bundles.items():
                if observer:
                    observer(f"opening {name}", len(models), len(bundles))
                models.append(open_model(name, bundle, limits, batching, options["session_options"]))
                if options["warmup"]:
                    models[-1].warm_up()
    except BaseException:
        for model in models:
            model.session.close(0)
        raise
    return models


def open_model(
    name: str, bundle: Bundle, limits: Limits, batching: Batching | None, session_options: Mapping[str, Any]
) -> ServedModel:
    """Open a bundle; its requests are joined if that is proven right, and a note says so if it is not."""
    from onnxplace.api import InferenceSession
    from onnxplace.serving import ServedModel, require_batching

    if batching is not None:
        try:
            require_batching(bundle)
        except UsageError as reason:
            print_notes([Diagnostic(reason.code, reason.message, where=reason.where, hint="it is served without that")])
            batching = None
    session = InferenceSession(
        bundle, trace=True, max_in_flight=limits.max_in_flight, batching=batching, **session_options
    )
    return ServedModel(name, bundle, session, limits, batching.max_batch if batching else 1)


@contextmanager
def stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first SIGTERM or interrupt; a second one does what it does elsewhere."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous: dict[int, Callable[..., Any] | int | None] = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request_stop(*_: object) -> None:
        restore()
        loop.call_soon_threadsafe(stop.set)

    for number in numbers:
        signal.signal(number, request_stop)
    try:
        yield
    finally:
        restore()
