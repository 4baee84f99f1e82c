"""The command `onnxplace serve`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxplace.cli.completion import BUNDLE_PATH
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    FiniteNumber,
    as_json,
    note_core_shortage,
    print_hint,
    print_json,
    print_notes,
    print_text,
    with_operator_libraries,
    with_runtime,
)
from onnxplace.cli.terminal import show_progress
from onnxplace.errors import Diagnostic, UsageError, format_names

if TYPE_CHECKING:
    import asyncio

    from onnxplace.bundle.bundle import Bundle
    from onnxplace.session.batched_session import Batching
    from onnxplace_serving.served_models import Limits, ServedModel

# Names that URLs, metrics and clients take as they are: no path of dots, and not `/v2/models/stats`.
_MODEL_NAME = re.compile(r"(?!\.*$|stats$)[A-Za-z0-9_.-]{1,200}")


@click.command(cls=GroupedCommand, short_help="Answer requests over HTTP and gRPC (KServe v2).")
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=BUNDLE_PATH)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all networks.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="For HTTP; 0: any.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="For gRPC  [default: the next after --port]")
@click.option("--isolate", is_flag=True, help="Run each model in processes that are opened again if a run ends them.")
@click.option(
    "--warmup",
    is_flag=True,
    help="Open all plans of each model, and run it at each size of its compile, before the first request.",
)
@click.option("--max-batch", default=1, show_default=True, metavar="ROWS",
              help="Join waiting requests up to this size, for models that are proven to allow it.")  # fmt: skip
@click.option("--max-delay", default=2.0, show_default=True, metavar="MS", help="Wait of a request to be joined.")
@click.option("--max-in-flight", default=8, show_default=True, help="Requests, or joined batches, that run at a time.")
@click.option("--max-queue", default=128, show_default=True, type=click.IntRange(0), help="Requests that wait.")
@click.option("--max-request", default="64MiB", show_default=True, metavar="SIZE", help="Size of a request.")
@click.option("--max-sequences", default=64, show_default=True, type=click.IntRange(1), help="Sequences with states.")
@click.option("--timeout", default=60.0, show_default=True, type=FiniteNumber(0.001, 1e6), metavar="SECONDS",
              help="Time of a request; also what requests in flight get at the end.")  # fmt: skip
@with_runtime
@with_operator_libraries
@as_json
def serve(bundles: tuple[Path, ...], host: str, port: int, grpc_port: int | None, json_: bool, **options: Any) -> None:
    """Answer requests for BUNDLE..., each a path or NAME=PATH, until SIGTERM or Ctrl-C.

    The protocol is KServe v2 (Open Inference Protocol), which tritonclient speaks. Metrics for Prometheus are at
    /metrics. All limits are for each model.
    """
    import asyncio

    from onnxplace_serving.served_models import ServedModels
    from onnxplace_serving.server import format_address, listen, require_server_packages, run_server

    require_server_packages()
    paths, limits = name_models(bundles), read_limits(options)
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
        with listen(host, min(port + 1, 65535) if grpc_port is None else grpc_port) as probe:
            grpc_port = probe.getsockname()[1]
        models = open_models(paths, limits, options, json_)
        address, grpc_address = format_address(host, port), format_address(host, grpc_port)

        def announce() -> None:
            described = {item.name: {"path": str(item.bundle.path), "max_batch": item.max_batch} for item in models}
            if json_:
                print_json({"http": f"http://{address}", "grpc": grpc_address, "models": described})
                return
            print_text(f"{format_names(described, quoted=False)}: http://{address}/v2 and grpc://{grpc_address}")
            print_hint("SIGTERM or Ctrl-C ends the server after the requests in flight")

        async def run() -> None:
            with stop_on_signals() as stop:
                await run_server(ServedModels(models), limits, listener, grpc_address, stop, announce)

        asyncio.run(run())


def name_models(bundles: tuple[Path, ...]) -> dict[str, Path]:
    """Return the path of each model by its name; raises UsageError for bad or repeated names.

    >>> {name: str(path) for name, path in name_models((Path("resnet.bundle"), Path("b=models/bert.bundle"))).items()}
    {'resnet': 'resnet.bundle', 'b': 'models/bert.bundle'}
    """
    paths: dict[str, Path] = {}
    for item in bundles:
        given, is_named, rest = str(item).partition("=")
        path = Path(rest) if is_named and not item.exists() else item
        name = given if path is not item else path.resolve().name.removesuffix(".bundle")
        if name in paths or not _MODEL_NAME.fullmatch(name):
            message = f"expected letters, digits, '_', '-' and '.' as the name of a model, got {name!r}"
            message = f"two models have the name {name!r}" if name in paths else message
            raise UsageError("U005", message, where=str(item), hint=f"choose another: onnxplace serve NAME={path}")
        paths[name] = path
    return paths


def read_limits(options: Mapping[str, Any]) -> Limits:
    """Return the limits that the options give; raises UsageError."""
    from onnxplace.session.batched_session import check_in_flight
    from onnxplace.target.parsing import parse_bytes
    from onnxplace_serving.served_models import Limits

    in_flight, size = check_in_flight(options["max_in_flight"], "--max-in-flight"), parse_bytes(options["max_request"])
    return Limits(in_flight, options["max_queue"], size, options["timeout"], options["max_sequences"])


def open_models(
    paths: Mapping[str, Path], limits: Limits, options: Mapping[str, Any], json_: bool
) -> list[ServedModel]:
    """Open all bundles, and run them if they are to be warm; after a failure, those that are open are closed."""
    from onnxplace.session.batched_session import Batching
    from onnxplace.session.inference_session import load
    from onnxplace_serving.served_models import require_servable

    batching = Batching(options["max_batch"], options["max_delay"])
    bundles = {name: load(path) for name, path in paths.items()}
    for bundle in bundles.values():
        require_servable(bundle)
        note_core_shortage(bundle, options["session_options"]["runtime"])
    models: list[ServedModel] = []
    try:
        with show_progress(json_, "opening models"):
            for name, bundle in bundles.items():
                more = {**options["session_options"], "isolate": options["isolate"], "warmup": options["warmup"]}
                models.append(open_model(name, bundle, limits, batching, more))
                if options["warmup"]:
                    models[-1].warm_up()
    except BaseException:
        for model in models:
            model.session.close(0)
        raise
    return models


def open_model(
    name: str, bundle: Bundle, limits: Limits, batching: Batching, session_options: Mapping[str, Any]
) -> ServedModel:
    """Open a bundle; its requests are joined if that is proven right, and a note says so if it is not."""
    from onnxplace.session.batched_session import require_batching
    from onnxplace.session.inference_session import InferenceSession
    from onnxplace_serving.served_models import ServedModel

    joins, more = batching.max_batch > 1, {"max_in_flight": limits.max_in_flight, **session_options}
    try:
        if joins:
            require_batching(bundle)
    except UsageError as reason:
        message = f"{reason.message}; it is served without that"
        print_notes([Diagnostic(reason.code, message, where=reason.where)])
        joins = False
    session = InferenceSession(bundle, trace=True, batching=batching if joins else None, **more)
    return ServedModel(name, bundle, session, limits, batching.max_batch if joins else 1)


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or interrupt sets; a second one does what it does elsewhere."""
    import asyncio

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request_stop(*_: object) -> None:
        for number, handler in previous.items():
            # In the loop: asyncio prints what a handler raises within a task.
            signal.signal(number, partial(loop.call_soon_threadsafe, handler) if callable(handler) else handler)
        loop.call_soon_threadsafe(stop.set)

    for number in previous:
        signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        restore()
