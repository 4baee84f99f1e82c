"""Thousands of faults, one at a time: python benchmarks/faults.py [--faults 2000] [--seed 0] [--streams | --weights].

Each fault hits one instruction of one device for one request, among others in flight, in a session of its own. The
programs are those of two fixed models with states and of random ones. After each fault, answers and errors, the other
requests, the next ones, states, closing and threads are checked (tests/support/fault_injection.py). The exit code is 1
if anything hung or was wrong.

With --streams, some of the devices are fake GPUs, which execute late what is enqueued (tests/support/fake_streams.py).
With --weights, faults hit reads and copies of weights that stream, in random chains (tests/support/weight_faults.py).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import onnxplace
from tests.support.fake_streams import FakeDriver, register_fake_kind, use_fake_driver
from tests.support.fault_injection import KINDS, Fault, inject, list_faults
from tests.support.small_programs import SmallModel, make_ping_pong, make_random_model
from tests.support.weight_faults import MEANINGS as WEIGHT_MEANINGS, draw_fault, inject as inject_weight_fault

MEANINGS = {
    "ort": "ONNX Runtime's error",
    "python": "ValueError",
    "memory": "an allocation of 4 EiB",
    "bad_alloc": "std::bad_alloc in a segment",
    "base": "a BaseException",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit",
    "sleep": "10 ms of sleep",
    "hang": "a hang, with a timeout",
    "kill": "SystemExit set from outside, at an instruction",
    "kill_outside": "SystemExit set from outside, at any moment",
}
HOST_DEVICES = ("cpu:0", "cpu:1", "cpu:2")
STREAM_DEVICES = ("fake:0", "fake:1", "cpu:0")
# A request in flight ends within this time of the fault.
MAX_SECONDS = 1.0
# Random faults for each random model.
FAULTS_PER_MODEL = 10


def draw_faults(
    folder: Path, count: int, seed: int, with_streams: bool = False
) -> Iterator[tuple[onnxplace.Bundle, SmallModel, Fault]]:
    """Yield faults: half of them in two fixed programs, half in random ones; all kinds equally often."""
    draw = random.Random(seed)
    names: tuple[str, ...] = STREAM_DEVICES if with_streams else HOST_DEVICES
    fixed = [compile_in(folder, f"fixed{devices}", make_ping_pong(devices), names) for devices in (2, 3)]
    for index in range(count):
        if index % FAULTS_PER_MODEL == 0:
            number = draw.randrange(1 << 30)
            names = tuple(draw.sample(names, len(names))) if with_streams else names
            drawn = compile_in(folder, f"random{number}", make_random_model(number), names)
        bundle, model = fixed[index % 2] if index % 4 < 2 else drawn
        kind = KINDS[index % len(KINDS)]
        if kind == "kill_outside":
            device = draw.choice(list(bundle.manifest.programs))
            part = draw.choice(["", " deliveries"]) if device.startswith("fake") else ""
            yield bundle, model, Fault(kind, device, -1, False, "submit", draw.uniform(0, 1e-3), part)
        else:
            yield bundle, model, draw.choice(list_faults(bundle, [kind]))


def compile_in(folder: Path, name: str, model: SmallModel, names: Sequence[str]) -> tuple[onnxplace.Bundle, SmallModel]:
    """Compile a model into a folder of its own."""
    (folder / name).mkdir()
    return model.compile(folder / name, names), model


def try_weight_faults(count: int, seed: int) -> int:
    """Inject faults into reads and copies of weights that stream; print a table, and return 1 after any problem."""
    draw, problems = random.Random(seed), 0
    times, answers, slowest = Counter[str](), defaultdict[str, Counter[str]](Counter), defaultdict[str, float](float)
    with register_fake_kind():
        for index in range(count):
            kind = list(WEIGHT_MEANINGS)[index % len(WEIGHT_MEANINGS)]
            fault, number = draw_fault(draw, kind), draw.randrange(1 << 30)
            with tempfile.TemporaryDirectory(prefix="onnxplace-faults-") as folder:
                try:
                    outcome = inject_weight_fault(Path(folder), fault, number)
                except AssertionError as problem:
                    problems += 1
                    print(f"{problem} (chain {number})", file=sys.stderr)
                    continue
            times[kind] += 1
            answers[kind].update(outcome.answers)
            slowest[kind] = max(slowest[kind], outcome.slowest_seconds)
    print("| fault | times | answers of requests in flight | slowest end of one |\n|---|---|---|---|")
    for kind, meaning in WEIGHT_MEANINGS.items():
        texts = ", ".join(f"{number} {answer}" for answer, number in sorted(answers[kind].items()))
        print(f"| {meaning} | {times[kind]} | {texts} | {slowest[kind] * 1e3:.0f} ms |")
    print(f"\nseed {seed}: {count} faults, {problems} problems")
    return 1 if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject faults, print a table, and return 1 after any problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", action="store_true", help="on fake GPUs, whose work is enqueued")
    parser.add_argument("--weights", action="store_true", help="of reads and copies of weights that stream")
    options = parser.parse_args(arguments)
    logging.disable()
    if options.weights:
        return try_weight_faults(options.faults, options.seed)
    answers, slowest, problems = defaultdict[str, Counter[str]](Counter), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="onnxplace-faults-") as folder, ExitStack() as stack:
        if options.streams:
            stack.enter_context(register_fake_kind())
            stack.enter_context(use_fake_driver(FakeDriver(options.seed)))
        for bundle, model, fault in draw_faults(Path(folder), options.faults, options.seed, options.streams):
            try:
                outcome = inject(bundle, model, fault)
            except AssertionError as problem:
                problems.append(str(problem))
                print(problem, file=sys.stderr)
                continue
            answers[fault.kind][outcome.answer + (", session over" if outcome.broken else "")] += 1
            if outcome.slowest_seconds > MAX_SECONDS:
                problems.append(f"{fault}: a request ended after {outcome.slowest_seconds:.1f} s")
            slowest[fault.kind] = max(slowest[fault.kind], round(outcome.slowest_seconds * 1e3))
    print("| fault | times | answers of the request | slowest end of a request in flight |\n|---|---|---|---|")
    for kind in KINDS:
        texts = ", ".join(f"{count} {answer}" for answer, count in sorted(answers[kind].items()))
        print(f"| {MEANINGS[kind]} | {answers[kind].total()} | {texts} | {slowest[kind]} ms |")
    print(f"\nseed {options.seed}: {options.faults} faults, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
