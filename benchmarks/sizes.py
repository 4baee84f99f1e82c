"""Several plans in one bundle, next to bundles that are compiled for one size each (docs/sizes.md).

    python benchmarks/sizes.py [MODEL ...] [--devices cpu:0,cpu:1] [--rounds 9] [--folder DIR] [--json F]

Each model is compiled for two sizes together, and for each of them alone. Then the three bundles run in turns: at both
sizes, and at two sizes between them. A row has the time of the bundle with plans over that of the better one of the
other two: the median of rounds, each a ratio of medians. The last rows are conversations of a decoder, a prompt and
tokens after it, whose cache moves where the plan changes. The first round does not count. The
limits are 1.05 at the sizes that were compiled for, and 1.10 elsewhere. Nothing else should run meanwhile. `--quick`
tries the benchmark itself, with small models and few runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from _tables import Row, print_table, report_progress

import models
import onnxplace
from _builder import GraphBuilder, float_value
from onnxplace.bundle.bundle import Bundle
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure.compare import time_in_turns
from onnxplace.runtime.interface import Result
from transformer_block import StackSizes, add_transformer_blocks

Sizes = Mapping[str, int]
Call = Callable[[], object]
# At sizes that were compiled for, and at others.
LIMITS = {True: 1.05, False: 1.10}
TOKENS = 32
# Short steps are repeated more often: for this time in a round, or at most so often.
ROUND_SECONDS, MAX_REPEAT = 0.3, 150
KEYS = ("model", "sizes", "kind", "plan", "plans", "first alone", "second alone", "overhead_alone", "within")


# -------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Case:
    """A model with two sizes that it is compiled for, and others between them."""

    build: Callable[..., onnx.ModelProto]
    sizes: Sequence[Sizes]
    between: Sequence[Sizes]
    small: Mapping[str, int] = field(default_factory=dict)
    """Options of a small variant."""
    is_decoder: bool = False


def build_resnet(seed: int = 0) -> onnx.ModelProto:
    """Return ResNet-50 with a symbolic batch."""
    model = models.build("resnet50", seed=seed)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    shapes = {node.input[1] for node in model.graph.node if node.op_type == "Reshape"}
    for tensor in model.graph.initializer:
        if tensor.name in shapes:
            _, *rest = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.array([-1, *rest], np.int64), tensor.name))
    return model


def build_encoder(layers: int = 4, width: int = 384, heads: int = 6, bands: int = 80) -> onnx.ModelProto:
    """Return an encoder of speech like Whisper's: convolutions, of which the second halves the frames, and blocks."""
    builder = GraphBuilder("speech_encoder", 0)
    value = "spectrogram"
    for name, inputs, stride in (("conv_0", bands, 1), ("conv_1", width, 2)):
        kernel = builder.random(f"{name}/weight", (width, inputs, 3), (1 / (3 * inputs)) ** 0.5)
        bias = builder.random(f"{name}/bias", (width,), 0.02)
        value = builder.node("Conv", [value, kernel, bias], name, pads=[1, 1], strides=[stride])
        value = builder.node("Relu", [value], f"{name}/relu")
    value = builder.node("Transpose", [value], "states", perm=[0, 2, 1])
    length = builder.node("Shape", [value], "positions/length", start=1, end=2)
    slices = [builder.random("positions/table", (1500, width), 0.5), builder.integers(0), length, builder.integers(0)]
    value = builder.node("Add", [value, builder.node("Slice", slices, "positions")], "positions/add")
    value = add_transformer_blocks(builder, value, StackSizes(layers, width, heads), "encoder")
    builder.node("Identity", [value], "encoded")
    frames = [float_value("spectrogram", "batch", bands, "frames")]
    return builder.model(frames, [float_value("encoded", "batch", "floor((frames - 1)/2) + 1", width)])


def make_sizes(names: str, *rows: Sequence[int]) -> list[Sizes]:
    """Return sizes of dimensions by name.

    >>> make_sizes("batch seq", (1, 8))
    [{'batch': 1, 'seq': 8}]
    """
    return [dict(zip(names.split(), row)) for row in rows]


CASES = {
    "transformer": Case(
        models.MODELS["transformer"].build,
        make_sizes("batch seq", (1, 8), (4, 256)),
        make_sizes("batch seq", (1, 48), (2, 128)),
        {"layers": 2, "hidden": 64},
    ),
    "bert": Case(
        lambda **options: models.build(
            "transformer", **{"layers": 6, "hidden": 768, "heads": 12, "vocab": 30522, **options}
        ),
        make_sizes("batch seq", (1, 8), (4, 128)),
        make_sizes("batch seq", (1, 32), (2, 64)),
        {"layers": 1, "hidden": 96, "vocab": 100},
    ),
    "resnet50": Case(build_resnet, make_sizes("batch", (1,), (8,)), make_sizes("batch", (2,), (4,))),
    "speech-encoder": Case(
        build_encoder,
        make_sizes("batch frames", (1, 100), (1, 3000)),
        make_sizes("batch frames", (1, 400), (1, 1200)),
        {"layers": 1, "width": 48},
    ),
    "decoder": Case(
        lambda **options: models.build(
            "decoder", **{"layers": 8, "hidden": 512, "heads": 8, "vocab": 8000, "positions": 1024, **options}
        ),
        make_sizes("batch seq past", (1, 1, 256), (1, 256, 0)),
        make_sizes("batch seq past", (1, 8, 128), (1, 32, 64)),
        {"layers": 2, "hidden": 64, "vocab": 100},
        is_decoder=True,
    ),
}


# ------------------------------------------------------------------------------------------------------------- measure


@dataclass(frozen=True)
class Measurement:
    """Bundles of a model that run in turns: the one with plans, and one for each size alone."""

    sessions: Sequence[onnxplace.InferenceSession]
    bundle: Bundle
    rounds: int
    repeat: int

    def compare(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the seconds of each call, and the overhead of the first one over the better one of the others."""
        seconds, overheads, repeat = list[list[float]](), list[float](), self.repeat
        for number in range(self.rounds + 1):
            # Each is the first of a round in turn: the first one finds the caches as the last one has left them.
            order = sorted(range(len(calls)), key=lambda index: (index - number) % len(calls))
            timings = time_in_turns({str(index): calls[index] for index in order}, repeat, 1)
            times = [timings[str(index)].median_seconds for index in range(len(calls))]
            if number:
                seconds.append(times)
                overheads.append(times[0] / min(times[1:]))
            repeat = max(self.repeat, min(round(ROUND_SECONDS / max(times)), MAX_REPEAT))
        return {
            **dict(zip(("plans", "first alone", "second alone"), map(median, zip(*seconds)))),
            "overhead_alone": median(overheads),
            "overheads": overheads,
        }

    def compare_steps(self, sizes: Sizes) -> dict[str, Any]:
        """Return the figures of requests of some sizes; each is a conversation of its own where there are states."""
        feeds = random_feeds(self.bundle.inputs, sizes, 0)

        def make_call(session: onnxplace.InferenceSession) -> Callable[[], Result]:
            has_states = bool(self.bundle.manifest.states)
            return lambda: (session.conversation() if has_states else session).run_timed(feeds)

        calls = [make_call(session) for session in self.sessions]
        return {**self.compare(calls), "plan": str(calls[0]().plan)}

    def compare_conversations(self, prompt: Sizes) -> dict[str, Any]:
        """Return the figures of conversations: a prompt, then one token after the other."""
        count = prompt["seq"]
        first = {"tokens": np.zeros((1, count), np.int64), **self.bundle.zero_states(batch=1, past=0)}
        plans = list[int]()

        def make_call(session: onnxplace.InferenceSession) -> Call:
            def converse() -> None:
                conversation = session.conversation()
                plans[:] = [conversation.run_timed(first).plan]
                for token in range(TOKENS):
                    plans.append(conversation.run_timed({"tokens": np.full((1, 1), token, np.int64)}).plan)

            return converse

        calls = [make_call(session) for session in self.sessions]
        figures = self.compare(calls)
        calls[0]()
        changes = [plan for index, plan in enumerate(plans) if not index or plan != plans[index - 1]]
        return {**figures, "plan": " then ".join(map(str, changes))}


def measure(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a model."""
    case, path = CASES[name], folder / f"{name}.onnx"
    models.save(case.build(**(case.small if options.quick else {})), path)
    state = {"present.*": "past.*"} if case.is_decoder else {}
    bundles = []
    for number, shape in enumerate([list(case.sizes), *([size] for size in case.sizes)]):
        report_progress(f"{name}: compiling for {'; '.join(map(format_sizes, shape))}")
        output = folder / f"{name}-{number}"
        bundles.append(onnxplace.compile(path, output, devices=options.devices, shape=shape, state=state, force=True))
    with ExitStack() as stack:
        sessions = [stack.enter_context(onnxplace.InferenceSession(bundle, warmup=True)) for bundle in bundles]
        measurement = Measurement(sessions, bundles[0], options.rounds, 3 if options.quick else 9)
        kinds = [("compiled for", size) for size in case.sizes] + [("between", size) for size in case.between]
        for kind, sizes in kinds:
            report_progress(f"{name}: {format_sizes(sizes)}")
            figures = measurement.compare_steps(sizes)
            yield make_row(name, format_sizes(sizes), kind, figures, is_compiled=kind == "compiled for")
        if case.is_decoder:
            text = f"{case.sizes[1]['seq']} tokens, then {TOKENS}"
            figures = measurement.compare_conversations(case.sizes[1])
            yield make_row(name, text, "conversation", figures, is_compiled=False)


def make_row(name: str, sizes: str, kind: str, figures: Mapping[str, Any], *, is_compiled: bool) -> Row:
    """Return a row of the table, with whether it is within its limit."""
    limit = LIMITS[is_compiled]
    within = "yes" if figures["overhead_alone"] <= limit else "no"
    return {"model": name, "sizes": sizes, "kind": kind, **figures, "limit": limit, "within": within}


def format_sizes(sizes: Sizes) -> str:
    """Return sizes as `--shape` takes them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"default {', '.join(CASES)}")
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--rounds", type=int, help="that count; default 9, with --quick 1")
    parser.add_argument("--folder", type=Path, help="for models and bundles; default a temporary one")
    parser.add_argument("--json", type=Path, metavar="F", help="write all rows there, in seconds")
    parser.add_argument("--quick", action="store_true", help="small models and few runs, to try the benchmark")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 9)
    names = options.names or [name for name, case in CASES.items() if case.small or not options.quick]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"there is no model {unknown[0]!r}: models are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = print_table("Sizes", KEYS, (row for name in names for row in measure(name, folder, options)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
