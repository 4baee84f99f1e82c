"""Compile in forked processes: each ends at another access to the disk, or all write to one destination at once.

    python tests/support/interrupted_compiles.py FOLDER {kill,raise,race} {fresh,force} {atomic,steps}

FOLDER contains model.onnx, tmp, and `old`, a bundle that `force` replaces. `kill` and `raise` print the number of
moments and the bundles found at the destination after them, as JSON. They fail if a bundle was incomplete, or if files
were left over after the next sweep (after `raise`, at once). `race` prints how each compile ended.
"""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import onnxplace
from onnxplace.bundle.staging import sweep_output
from onnxplace.driver.compile import compile_model
from onnxplace.errors import UsageError
from onnxplace.utils import renames

# The second placer writes other files than the first, so that old and new bundles can be distinguished.
PIPELINE = "optimize,profile{estimate=true},coplace{join=never},PLACER,split,emit"
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "open")
TERMINATED = 143


class Moments:
    """Counts accesses to the disk below a folder, and ends the process at one of these moments."""

    def __init__(self, folder: Path, last: int, killed: bool) -> None:
        self.folder, self.last, self.killed = str(folder), last, killed
        self.count = 0
        sys.addaudithook(self.hook)
        self.actual = renames._renameat2
        renames._renameat2 = self.exchange

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in WRITES or not str(arguments[0]).startswith(self.folder):
            return
        if event != "open" or int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            self.count_moment()

    def exchange(self, *arguments: object) -> bool:
        self.count_moment()
        succeeded = self.actual(*arguments)
        self.count_moment()
        return succeeded

    def count_moment(self) -> None:
        self.count += 1
        if self.count == self.last:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise SystemExit(TERMINATED)


def compile_into(folder: Path, force: bool) -> None:
    pipeline = PIPELINE.replace("PLACER", "m-etf")
    compile_model(
        folder / "model.onnx", folder / "b", devices="cpu:0,cpu:1", shape={"batch": 4}, pipeline=pipeline, force=force
    )


def fork_interrupted(folder: Path, force: bool, last: int, killed: bool) -> tuple[int, int]:
    """Fork a compile that ends at its `last` moment; returns its exit code, and all moments if it completed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            moments = Moments(folder, last, killed)
            compile_into(folder, force)
            os.write(write, str(moments.count).encode())
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        count = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(count or 0)


def list_results(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"model.onnx", "old", "tmp"}


def read_placer(folder: Path) -> str:
    """Return the placer of the bundle, or "none"; raises OnnxplaceError if the bundle is incomplete."""
    return onnxplace.load(folder / "b", "all").manifest.placer if (folder / "b").exists() else "none"


def race(folder: Path, force: bool, count: int = 4) -> list[str]:
    """Let forked compiles write to one destination at once; returns their exit codes."""
    begin, go = os.pipe()
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(go)
                os.read(begin, 1)  # until all have started
                compile_into(folder, force)
                code = 0
            except UsageError as problem:
                code = int(problem.code[1:])
            finally:
                os._exit(code)
        children.append(child)
    os.close(begin)
    os.close(go)
    return sorted(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def interrupt(folder: Path, force: bool, killed: bool) -> dict[str, int]:
    """Interrupt at every moment; returns their number, and how often each bundle was found afterwards."""
    placers: Counter[str] = Counter()
    moment = 0
    while True:
        moment += 1
        prepare(folder, force)
        code, count = fork_interrupted(folder, force, moment, killed)
        if count:
            break
        assert code == (-signal.SIGKILL if killed else TERMINATED), (moment, code)
        leftovers = list_results(folder) - {"b"}
        notes = sweep_output(folder / "b") if killed else []
        assert list_results(folder) <= {"b"}, (moment, list_results(folder))
        assert notes or not leftovers, (moment, leftovers)
        assert not any((folder / "tmp").iterdir()), moment
        placers[read_placer(folder)] += 1
        assert not force or not placers["none"], moment
    assert read_placer(folder) == "m-etf"
    return {"moments": moment - 1, **placers}


def prepare(folder: Path, force: bool) -> None:
    shutil.rmtree(folder / "b", ignore_errors=True)
    if force:
        shutil.copytree(folder / "old", folder / "b")


def main() -> None:
    folder, (ending, destination, exchange) = Path(sys.argv[1]), sys.argv[2:]
    force = destination == "force"
    compile_into(folder, force=True)  # so that the children inherit all loaded modules
    if exchange == "steps":
        renames._renameat2 = lambda *_: False
    prepare(folder, force)
    result = race(folder, force) if ending == "race" else interrupt(folder, force, ending == "kill")
    assert list_results(folder) == {"b"}, list_results(folder)
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
