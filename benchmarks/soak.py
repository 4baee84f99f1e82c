"""Random faults for ten minutes: python benchmarks/soak.py [--seconds 600] [--seed 0].

Two parts run at the same time. In the first, sessions run, time out, close, are dropped, fork, get callbacks that
raise, lose their workers, and are interrupted, in processes that are themselves interrupted, terminated and killed.
In the second, bundles are compiled to one folder, with kills, interrupts, full disks and other compiles in between;
the folder always holds a whole bundle. The exit code is 1 if anything was lost, hung, leaked or wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.feeds.synthetic import random_feeds
from tests.conftest import FAST_PIPELINE, branches
from tests.support.endless import endless_bundle

ROOT = Path(__file__).parents[1]

HUNG_SECONDS = 90
# Growth of a process that repeats the same actions.
MAX_GROWTH_BYTES = 96 << 20
# Exit codes after a signal: Python may not have started yet, or have ended already.
ENDS_BY = {
    signal.SIGINT: {0, 1, 130, -signal.SIGINT},
    signal.SIGTERM: {0, 143, -signal.SIGTERM},
    signal.SIGKILL: {0, -signal.SIGKILL},
}

# The text that Python prints for an interrupt while it frees an object: the exception has no caller.
SWALLOWED_INTERRUPT = re.compile(r"Exception ignored in: .*\nTraceback .*\n(?: .*\n|\n)*KeyboardInterrupt: ?\n")

STATES = """
<ir_version: 8, opset_import: ["": 17]>
states (float[4] x, float[4] total) => (float[4] y, float[4] total_next) {
    [add] total_next = Add(total, x)
    [double] opposite = Neg(total_next)
    [back] y = Neg(opposite)
}
"""


class BrokenError(Exception):
    """Something was lost, hung, leaked or wrong."""


def require(condition: object, message: str) -> None:
    """Raise BrokenError unless a condition holds."""
    if not condition:
        raise BrokenError(message)


def wait_for_end(process: subprocess.Popen[str], what: str) -> tuple[int, str, str]:
    """Return the exit code and the output of a process; raises BrokenError if it hangs."""
    try:
        out, err = process.communicate(timeout=HUNG_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # a process of sessions prints its stacks then
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
        print(process.communicate()[1], file=sys.stderr)
        raise BrokenError(f"{what} hangs") from None
    return process.returncode, out, err


# ------------------------------------------------------------------------------------------------------ sessions


class Sessions:
    """Processes that use sessions for some seconds each."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.counts = random.Random(f"sessions {seed}"), collections.Counter[str]()
        folder.mkdir()
        self.endless = endless_bundle(folder)
        self.states = compile_states_bundle(folder)

    def step(self, seconds: float) -> None:
        """Let one process soak, send it signals, and check its report."""
        seed = str(self.random.randrange(1 << 30))
        script = Path(__file__).with_name("_soak_sessions.py")
        command = [sys.executable, str(script), str(self.endless.path), str(self.states.path), str(seconds), seed]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        what = f"the process of sessions with seed {seed}"
        assert process.stdout is not None
        require(process.stdout.readline() == "ready\n", f"{what} does not begin")
        last = self.random.choice([None, None, None, signal.SIGTERM, signal.SIGKILL])
        ends = time.monotonic() + seconds * (1.0 if last is None else self.random.random())
        while time.monotonic() < ends - 0.5:
            time.sleep(min(self.random.expovariate(1.0), max(ends - time.monotonic(), 0)))
            if process.poll() is None and time.monotonic() < ends - 0.5:
                process.send_signal(signal.SIGINT)
                self.counts["interrupts of processes with sessions"] += 1
        if last is not None:
            process.send_signal(last)
            self.counts[f"{last.name} to processes with sessions"] += 1
        code, out, err = wait_for_end(process, what)
        if last is not None:
            require(code in ENDS_BY[last], f"{what} ended with {code}: {err}")
            return
        if code == 130 and "interrupted again" in err:  # as documented for two signals in a row
            self.counts["second interrupts that ended a process"] += 1
            return
        require(code == 0 and not SWALLOWED_INTERRUPT.sub("", err), f"{what} ended with {code}: {err}")
        report = json.loads(out)
        for name, count in report["counts"].items():
            self.counts[f"session: {name}"] += count
        before, after = report["before"], report["after"]
        require(after["threads"] == 0, f"{what} leaks {after['threads']} threads")
        require(after["files"] <= before["files"] + 2, f"{what} leaks files: {before['files']}, then {after['files']}")
        growth = after["resident_bytes"] - before["resident_bytes"]
        require(growth < MAX_GROWTH_BYTES, f"{what} grows by {growth} bytes")
        self.counts["processes with sessions, through to their end"] += 1


def compile_states_bundle(folder: Path) -> onnxplace.Bundle:
    """Compile a model whose state is on one device and whose output crosses to the other."""
    from onnx import parser

    device_map = folder / "states.json"
    device_map.write_text(json.dumps({"double": "cpu:1", ".*": "cpu:0"}))
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{device_map}"}},m-topo,split,emit'
    return compile_model(
        parser.parse_model(STATES),
        folder / "states.bundle",
        devices="cpu:0,cpu:1",
        state=("total_next=total",),
        pipeline=pipeline,
    ).bundle


# ------------------------------------------------------------------------------------------------------ compiles


class Compiles:
    """Compiles of two models to one folder, next to a file of the user."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.counts = random.Random(f"compiles {seed}"), collections.Counter[str]()
        folder.mkdir()
        self.folder, self.output, self.user_file = folder, folder / "out.bundle", folder / "notes.txt"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.user_file.write_text("the user's own")
        self.models, self.expected_outputs = [], []
        for number in range(2):
            model = folder / f"model{number}.onnx"
            model.write_bytes(branches(seed=number).SerializeToString())
            self.models.append(model)
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "ONNXPLACE_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        for number in range(2):
            require(self.compile(number) == 0, "the first compile fails")
            bundle = onnxplace.load(self.output)
            self.feeds = random_feeds(bundle.inputs, {"batch": 4})
            self.expected_outputs.append(compute_outputs(bundle, self.feeds))

    def start(self, number: int, **options: Any) -> subprocess.Popen[str]:
        more = [] if self.random.random() < 0.15 else ["--pipeline", FAST_PIPELINE]
        command = [sys.executable, "-m", "onnxplace", "compile", str(self.models[number]), "-o", str(self.output)]
        command += ["--devices", "cpu:0,cpu:1", "--shape", "batch=4", "--force", *more]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment,
            start_new_session=True, **options
        )  # fmt: skip

    def compile(self, number: int, **options: Any) -> int:
        code, _, err = wait_for_end(self.start(number, **options), "a compile")
        require("Traceback" not in err, f"a compile shows a traceback: {err}")
        return code

    def step(self, seconds: float) -> None:
        """Compile once with a fault, and check the folder."""
        number = self.random.randrange(2)
        faults: list[Callable[[int], set[int]]] = [
            self.without_fault, self.at_once, self.with_full_disk, self.with_a_users_file, self.without_force,
            *(partial(self.with_signal, number=signal_) for signal_ in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)),
        ]  # fmt: skip
        fault = self.random.choice(faults)
        allowed = fault(number) if not isinstance(fault, partial) else fault(model=number)
        name = fault.keywords["number"].name if isinstance(fault, partial) else fault.__name__
        self.counts[f"compile: {name}"] += 1
        self.check_folder(allowed, name)

    def check_folder(self, allowed: set[int], name: str) -> None:
        """Require a whole bundle of one of these models, and the user's file."""
        bundle = onnxplace.load(self.output, "all")
        outputs = compute_outputs(bundle, self.feeds)
        require(
            any(np.array_equal(outputs, self.expected_outputs[model]) for model in allowed),
            f"after {name}: another bundle",
        )
        require(self.user_file.read_text() == "the user's own", f"after {name}: the user's file was altered")

    def without_fault(self, model: int) -> set[int]:
        require(self.compile(model) == 0, "a compile fails")
        remains = [path for folder in (self.folder, self.temporary) for path in folder.glob(".onnxplace-*")]
        require(not remains, f"a compile leaves {remains}")
        remains = list(self.temporary.iterdir())
        require(not remains, f"a compile leaves {remains}")
        return {model}

    def with_signal(self, model: int, number: signal.Signals) -> set[int]:
        process = self.start(model)
        time.sleep(self.random.uniform(0, 2.0))
        process.send_signal(number)
        code, _, err = wait_for_end(process, f"a compile that got {number.name}")
        require(code in ENDS_BY[number], f"a compile that got {number.name} ends with {code}: {err}")
        return {model} if code == 0 else {0, 1}

    def at_once(self, model: int) -> set[int]:
        processes = [self.start(number) for number in (0, 1, model)]
        codes = [wait_for_end(process, "a compile among others")[0] for process in processes]
        require(codes == [0, 0, 0], f"simultaneous compiles end with {codes}")
        return {0, 1}

    def with_full_disk(self, model: int) -> set[int]:
        limit = self.random.randrange(1, 60_000)
        code = self.compile(model, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        require(code in (0, 4), f"a compile on a full disk ends with {code}")
        return {model} if code == 0 else {0, 1}

    def with_a_users_file(self, model: int) -> set[int]:
        own = self.output / "mine.txt"
        own.write_text("mine")
        code = self.compile(model)
        require(code == 2 and own.read_text() == "mine", f"--force replaces a user's file, with {code}")
        own.unlink()
        return {0, 1}

    def without_force(self, model: int) -> set[int]:
        command = [sys.executable, "-m", "onnxplace", "compile", str(self.models[model]), "-o", str(self.output)]
        code = subprocess.run(command, capture_output=True, env=self.environment, timeout=HUNG_SECONDS).returncode
        require(code == 2, f"without --force, a bundle that is there gives {code}")
        return {0, 1}


def compute_outputs(bundle: onnxplace.Bundle, feeds: Any) -> Any:
    """Run a bundle and return its outputs as one array."""
    with onnxplace.InferenceSession(bundle) as session:
        return np.concatenate([np.ravel(output) for output in session.run(None, feeds, timeout=HUNG_SECONDS)])


# ------------------------------------------------------------------------------------------------------ both parts


def soak(part: Any, ends: float, problems: list[str]) -> None:
    """Repeat the steps of a part until the time is over, or one of them fails."""
    try:
        while not problems and (left := ends - time.monotonic()) > 1:
            part.step(min(part.random.uniform(3, 12), max(left, 2)))
    except Exception as problem:  # noqa: BLE001 - any exception is a finding
        problems.append(str(problem) if isinstance(problem, BrokenError) else traceback.format_exc())


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print the number of actions, and return 1 after any problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    folder, problems = Path(tempfile.mkdtemp(prefix="onnxplace-soak-")), list[str]()
    parts: tuple[Sessions | Compiles, ...] = ()
    try:
        os.environ["ONNXPLACE_CACHE_DIR"] = str(folder / "cache")
        sessions, compiles = Sessions(folder / "sessions", options.seed), Compiles(folder / "compiles", options.seed)
        parts = (sessions, compiles)
        ends = time.monotonic() + options.seconds
        threads = [threading.Thread(target=soak, args=(part, ends, problems)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not problems:  # a successful compile sweeps the remains of killed ones
            compiles.without_fault(0)
    except BrokenError as problem:
        problems.append(str(problem))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("| what | times |\n|---|---|")
    for name, count in sorted(item for part in parts for item in part.counts.items()):
        print(f"| {name} | {count} |")
    print(f"\nseed {options.seed}: " + ("; ".join(problems) or "nothing lost, hung, leaked or wrong"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
