"""Generate text with a bundle of a decoder, token by token.

    onnxplace compile my-model --llm
    python examples/generate.py my-model/model.bundle --prompt "Once upon a time" --temperature 0.8

The tokenizer is that in the folder of the bundle, or above a folder `onnx`, where exporters put `tokenizer.json` (read
by the package tokenizers) or the files of a slower one (transformers). Without these, tokens are the bytes of the
prompt, or its numbers: `--prompt "7 42 99"`. The cache stays on its devices: each call after the
prompt takes one token. Where the bundle has a plan for prompts and one for tokens, it says at the end which ones ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnxplace import Bundle, InferenceSession
    from onnxplace.feeds import Declared

Logits = NDArray[np.float32]
Chooser = Callable[[Logits], int]
BYTES = 256
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows for the first bytes of a character


# -------------------------------------------------------------------------------------------------------------- tokens


class Tokenizer(Protocol):
    """Text to token ids, and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Tokens are the bytes of the text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([i]) if i < BYTES else f"<{i}>".encode() for i in ids).decode(errors="replace")


class NumberTokenizer:
    """The text is the numbers of the tokens."""

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {number}" for number in ids)


class FileTokenizer:
    """A `tokenizer.json`, read by the package tokenizers."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self.fast = Fast.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self.fast.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.fast.decode(list(ids)))


def open_tokenizer(folder: Path, prompt: str) -> Tokenizer:
    """Return the tokenizer in a folder, or one that needs no file."""
    try:
        if (folder / "tokenizer.json").is_file():
            return FileTokenizer(folder / "tokenizer.json")
        if (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            slow: Tokenizer = AutoTokenizer.from_pretrained(folder)
            return slow
    except ModuleNotFoundError as error:
        raise SystemExit(f"the tokenizer in {folder} needs: pip install {error.name}") from None
    return NumberTokenizer() if prompt.replace(" ", "").isdecimal() else ByteTokenizer()


def find_tokenizer(bundle: Path) -> Path:
    """Return the folder of a bundle's tokenizer: the one of the bundle, or the one above for `onnx/model.bundle`."""
    folder = bundle.resolve().parent
    return folder.parent if folder.name == "onnx" and not any(folder.glob("tokenizer*")) else folder


def read_ends(folder: Path) -> set[int]:
    """Return the tokens after which a text ends, as the configuration of the model has them."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ends = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if ends is not None:
                return set(ends) if isinstance(ends, list) else {ends}
    return set()


# ------------------------------------------------------------------------------------------------------------ generate


def make_chooser(temperature: float, top_k: int, seed: int | None) -> Chooser:
    """Return what chooses a token by its logits [vocabulary]: the likeliest, or one of the `top_k` likeliest."""
    random = np.random.default_rng(seed)

    def sample(logits: Logits) -> int:
        likeliest = np.argsort(logits)[-top_k:]
        weights = np.exp((logits[likeliest] - logits.max()) / temperature, dtype=np.float64)
        return int(random.choice(likeliest, p=weights / weights.sum()))

    return sample if temperature > 0 else lambda logits: int(logits.argmax())


def make_feeds(inputs: Sequence[Declared], tokens: Sequence[int], past: int) -> dict[str, NDArray[Any]]:
    """Return what a decoder reads besides its cache: tokens, their positions, and a mask that hides none."""
    from onnxplace.feeds import numpy_type

    total, feeds = past + len(tokens), {}
    for item in inputs:
        value: NDArray[Any]
        if "mask" in item.name:
            value = np.ones((1, total))
        elif "position" in item.name:
            value = np.arange(past, total)
        elif "int" in item.dtype:
            value = np.array(tokens)
        else:
            raise SystemExit(f"this example has no value for input {item.name!r}, {item.dtype}")
        feeds[item.name] = value.reshape((1,) * (len(item.shape or ()) - value.ndim) + value.shape).astype(
            numpy_type(item.dtype)
        )
    return feeds


def generate(
    bundle: Bundle, session: InferenceSession, prompt: Sequence[int], choose: Chooser, plans: list[int] | None = None
) -> Iterator[int]:
    """Yield tokens after the prompt, as long as they are asked for; `plans` gets the plan that ran each call.

    `session` may also be a conversation. A model for single tokens gets the prompt token by token.
    """
    states = {state.name for state in bundle.state_inputs}
    inputs = [item for item in bundle.inputs if item.name not in states and not item.optional]
    single = any("int" in item.dtype and (item.shape or ("",))[-1] == 1 for item in inputs)
    logits_name = next((o.name for o in bundle.returned_outputs if "logits" in o.name), bundle.returned_outputs[0].name)
    feeds = make_empty_cache(bundle)
    waiting, past = list(prompt), 0
    while True:
        tokens = waiting[:1] if single else waiting
        result = session.submit({**make_feeds(inputs, tokens, past), **feeds}).result()
        logits = result.outputs[logits_name]
        if plans is not None:
            plans.append(result.plan)
        feeds, past, waiting = {}, past + len(tokens), waiting[len(tokens) :]  # from now on the session has the cache
        if not logits.size:
            raise SystemExit(f"\nthe context of the model is full after {past} tokens")
        if not waiting:
            waiting = [choose(np.asarray(logits, np.float32).reshape(-1, logits.shape[-1])[-1])]
            yield waiting[0]


def make_empty_cache(bundle: Bundle) -> dict[str, NDArray[Any]]:
    """Return the states before the first token: one sequence, no past tokens."""
    open_axes = [[entry for entry in item.shape or () if isinstance(entry, str)] for item in bundle.state_inputs]
    batch = {names[0]: 1 for names in open_axes if len(names) > 1}
    return bundle.zero_states(**{name: batch.get(name, 0) for names in open_axes for name in names})


def stream_text(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """Yield the text of tokens as it grows; a character of several tokens comes with its last one."""
    seen: list[int] = []
    text, shown = "", 0
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith(UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]


def describe_speed(start: float, times: Sequence[float], plans: Sequence[int]) -> str:
    """Return the time to the first token, and the rate of the others, with the plans that ran them."""
    first, rest = (f" by plan {'+'.join(map(str, sorted(set(part))))}" * bool(part) for part in (plans[:1], plans[1:]))
    text = f"{len(times)} tokens" + (f", the first after {(times[0] - start) * 1e3:.0f} ms{first}" if times else "")
    return text + (f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s{rest}" if times[1:] else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print text after a prompt as it is generated."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported
    import onnxplace
    from onnxplace.errors import OnnxplaceError

    parser = argparse.ArgumentParser(description="Generate text with a bundle of a decoder.")
    parser.add_argument("bundle", type=Path, help="what `onnxplace compile --llm` wrote")
    parser.add_argument("--prompt", default="Once upon a time", help="a text, or numbers of tokens")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="at most so many, default 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="chosen among so many likeliest tokens, default 50")
    parser.add_argument("--seed", type=int, help="the same seed chooses the same tokens")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: next to the bundle")
    options = parser.parse_args(arguments)
    folder = options.tokenizer or find_tokenizer(options.bundle)
    tokenizer, ends = open_tokenizer(folder, options.prompt), read_ends(folder)
    prompt, shown = tokenizer.encode(options.prompt), ""
    times, plans = list[float](), list[int]()
    if not prompt:
        parser.error("expected a prompt of at least one token")

    def limit(ids: Iterator[int]) -> Iterator[int]:
        for token in ids:
            if token in ends:
                return
            times.append(time.perf_counter())
            yield token
            if len(times) == options.tokens:
                return

    try:
        bundle = onnxplace.load(options.bundle)
        if not bundle.manifest.states:
            parser.error(f"{options.bundle} has no states: compile the decoder with --llm")
        with onnxplace.InferenceSession(bundle, warmup=True) as session:
            shown = options.prompt
            print(shown, end="", flush=True)
            start = time.perf_counter()
            choose = make_chooser(options.temperature, options.top_k, options.seed)
            for text in stream_text(tokenizer, limit(generate(bundle, session, prompt, choose, plans))):
                print(text, end="", flush=True)
    except OnnxplaceError as error:
        print("\n" * bool(shown) + str(error), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(f"\n{describe_speed(start, times, plans if bundle.manifest.plans else [])}", file=sys.stderr)


if __name__ == "__main__":
    main()
