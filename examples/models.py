"""Build the example models: `python examples/models.py NAME -o model.onnx [--seed N] [options]`."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from decoder import decoder
from gnmt import gnmt
from light_models import light_model
from transformer import transformer
from two_encoders import two_encoders
from two_tower import two_tower

EXTERNAL_DATA_LIMIT = 1 << 30  # bytes; one protobuf file must stay below twice this
EXTERNAL_TENSOR_SIZE = 1 << 10  # bytes; smaller weights stay inside the model file


@dataclass(frozen=True)
class Recipe:
    """A function that builds a model from `seed` and integer options, with a summary."""

    build: Callable[..., onnx.ModelProto]
    summary: str

    def options(self) -> dict[str, int]:
        """Return the options of the function, `seed` included, with their defaults."""
        parameters = inspect.signature(self.build).parameters
        return {name: int(parameter.default) for name, parameter in parameters.items()}


def _make_light_recipe(name: str, summary: str) -> Recipe:
    """Return the recipe of an image network of the onnx wheel."""
    return Recipe(functools.partial(light_model, name), f"{summary}, 1000 classes, fixed batch of 1")


MODELS: dict[str, Recipe] = {
    "two-tower": Recipe(two_tower, "CLIP-like image and text towers that meet in a similarity matrix"),
    "two-encoders": Recipe(two_encoders, "LSTM encoders of audio and video, and a classifier of both"),
    "gnmt": Recipe(gnmt, "LSTM encoder-decoder with attention, unrolled over time into primitive ops"),
    "transformer": Recipe(transformer, "transformer text encoder, symbolic batch and sequence length"),
    "decoder": Recipe(decoder, "GPT-like decoder with a cache of keys and values: bind it with --state"),
    "inception-v1": _make_light_recipe("inception-v1", "Inception v1 (GoogLeNet): branches of convolutions"),
    "inception-v2": _make_light_recipe("inception-v2", "Inception v2: branches with batch normalisation"),
    "resnet50": _make_light_recipe("resnet50", "ResNet-50: residual bottleneck blocks"),
    "densenet121": _make_light_recipe("densenet121", "DenseNet-121: every layer reads all before it in its block"),
    "squeezenet": _make_light_recipe("squeezenet", "SqueezeNet: small network of fire modules"),
    "shufflenet": _make_light_recipe("shufflenet", "ShuffleNet: grouped convolutions and channel shuffles"),
    "vgg19": _make_light_recipe("vgg19", "VGG-19: a plain chain, 574 MB of weights"),
    "alexnet": _make_light_recipe("alexnet", "AlexNet: a plain chain, most weights in three dense layers"),
    "zfnet512": _make_light_recipe("zfnet512", "ZFNet-512: a wider AlexNet"),
}


def build(name: str, **options: int) -> onnx.ModelProto:
    """Return the example model `name`; `options` are its seed and sizes, such as layers=2."""
    return MODELS[name].build(**options)


def save(model: onnx.ModelProto, path: Path, external: bool = False) -> None:
    """Write and check a model.

    With `external`, or beyond 1 GiB, its weights go to `<path>.data`.
    """
    if external or weight_bytes(model) > EXTERNAL_DATA_LIMIT:
        location = f"{path.name}.data"
        path.with_name(location).unlink(missing_ok=True)  # onnx appends to an existing file
        onnx.save_model(
            model,
            path,
            save_as_external_data=True,
            location=location,
            size_threshold=EXTERNAL_TENSOR_SIZE,
        )
    else:
        onnx.save_model(model, path)
    # By path: the checker does not accept a model of more than 2 GiB in memory.
    onnx.checker.check_model(path, full_check=True)


def weight_bytes(model: onnx.ModelProto) -> int:
    """Return the size of the weights in bytes.

    ModelProto.ByteSize fails on 2 GiB and more.
    """
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def main(arguments: Sequence[str]) -> int:
    """Run the command line: list the models, or build and write one."""
    parser = _make_parser()
    parsed = parser.parse_args(arguments)
    if parsed.list:
        print(format_list())
        return 0
    if parsed.name is None:
        parser.error("give the NAME of a model, or --list")
    options = {option: getattr(parsed, option) for option in MODELS[parsed.name].options()}
    try:
        model = build(parsed.name, **options)
        size = weight_bytes(model)  # before saving, which may move the weights out of the model
        save(model, parsed.output, parsed.external)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{parsed.output}: {len(model.graph.node)} nodes, {size / 1e6:.1f} MB of weights")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    """Return a parser with one subcommand for each model."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="NAME --help shows the options of a model.")
    parser.add_argument("--list", action="store_true", help="list the models and their options")
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    for name, recipe in MODELS.items():
        _add_options(commands.add_parser(name, help=recipe.summary, description=recipe.summary), recipe)
    return parser


def _add_options(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    """Add the options of a model to its subcommand."""
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    parser.add_argument("--external", action="store_true", help="write the weights to a .data file next to it")
    for option, default in recipe.options().items():
        kind = int if option == "seed" else _parse_size
        parser.add_argument(_format_flag(option), type=kind, default=default, help=f"default {default}")


def _parse_size(text: str) -> int:
    """Parse a size: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _format_flag(option: str) -> str:
    """Return the command-line spelling of an option."""
    return "--" + option.replace("_", "-")


def format_list() -> str:
    """Return two lines per model: name and summary, then options with defaults."""
    lines: list[str] = []
    for name, recipe in MODELS.items():
        flags = "".join(f" [{_format_flag(option)} {default}]" for option, default in recipe.options().items())
        lines.append(f"{name:14}{recipe.summary}\n{'':14}{flags.strip()}")
    return "\n".join(lines)


def entry() -> int:
    """Run the command line; a closed pipe, as in `--list | head`, is not a failure."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit succeeds
        return 0
    return code


if __name__ == "__main__":
    sys.exit(entry())
