"""Compile in forked processes: each ends at another touch of the disk, or all of them write to one place at once.

    python tests/support/interrupted_compiles.py FOLDER {kill,raise,race} {fresh,force} {atomic,steps}

FOLDER holds model.onnx, tmp, and `old`, a bundle that `force` replaces. `kill` and `raise` print how many moments were
tried, and what was at the place of the bundle after each, as JSON. They fail if that was not whole, or if anything was
left after the next sweep (after `raise`, at once). `race` prints how each compile ended.
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
from onnxplace.driver import compile_model
from onnxplace.errors import UsageError
from onnxplace.utils import renames

# The second placer gives other files than the first, so that old and new can be told apart.
PIPELINE = "optimize,profile{estimate=true},coplace{join=never},PLACER,split,emit"
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "open")
TERMINATED = 143


class Moments:
    """Counts what is about to be done to the disk below a folder, and ends the process at one of these moments."""

    def __init__(self, folder: Path, last: int, killed: bool) -> None:
        self.folder, self.last, self.killed = str(folder), last, killed
        self.count = 0
        sys.addaudithook(self.hook)
        self.actual = renames._renameat2
        renames._renameat2 = self.renamed

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in WRITES or not str(arguments[0]).startswith(self.folder):
            return
        if event != "open" or int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            self.pass_by()

    def renamed(self, *arguments: object) -> bool:
        self.pass_by()
        done = self.actual(*arguments)
        self.pass_by()
        return done

    def pass_by(self) -> None:
        self.count += 1
        if self.count == self.last:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise SystemExit(TERMINATED)


def compiled(folder: Path, force: bool) -> None:
    pipeline = PIPELINE.replace("PLACER", "m-etf")
    compile_model(
        folder / "model.onnx", folder / "b", devices="cpu:0,cpu:1", shape={"batch": 4}, pipeline=pipeline, force=force
    )


def ended(folder: Path, force: bool, last: int, killed: bool) -> tuple[int, int]:
    """Fork a compile that ends at its `last` moment; returns how it ended, and the moments of one that did not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            moments = Moments(folder, last, killed)
            compiled(folder, force)
            os.write(write, str(moments.count).encode())
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(said or 0)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"model.onnx", "old", "tmp"}


def placer(folder: Path) -> str:
    """Return which bundle is there; raises OnnxplaceError if it is not whole."""
    return onnxplace.load(folder / "b", "all").manifest.placer if (folder / "b").exists() else "none"


def race(folder: Path, force: bool, count: int = 4) -> list[str]:
    """Let forked compiles write to one place at once; returns how they ended."""
    begin, go = os.pipe()
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(go)
                os.read(begin, 1)  # until all are there
                compiled(folder, force)
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
    """Try every moment; returns how many there were, and how often which bundle was there afterwards."""
    seen: Counter[str] = Counter()
    moment = 0
    while True:
        moment += 1
        prepare(folder, force)
        code, count = ended(folder, force, moment, killed)
        if count:
            break
        assert code == (-signal.SIGKILL if killed else TERMINATED), (moment, code)
        before = left(folder) - {"b"}
        notes = sweep_output(folder / "b") if killed else []
        assert left(folder) <= {"b"}, (moment, left(folder))
        assert notes or not before, (moment, before)
        assert not any((folder / "tmp").iterdir()), moment
        seen[placer(folder)] += 1
        assert not force or not seen["none"], moment
    assert placer(folder) == "m-etf"
    return {"moments": moment - 1, **seen}


def prepare(folder: Path, force: bool) -> None:
    shutil.rmtree(folder / "b", ignore_errors=True)
    if force:
        shutil.copytree(folder / "old", folder / "b")


def main() -> None:
    folder, (how, what, kind_of_renames) = Path(sys.argv[1]), sys.argv[2:]
    compiled(folder, force=True)  # so that the children need not load what this one has
    if kind_of_renames == "steps":
        renames._renameat2 = lambda *_: False
    prepare(folder, what == "force")
    result = race(folder, what == "force") if how == "race" else interrupt(folder, what == "force", how == "kill")
    assert left(folder) == {"b"}, left(folder)
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
