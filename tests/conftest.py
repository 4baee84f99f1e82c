"""What the tests share: small models, a compiled bundle, and the command line run in this process."""

import gc
import itertools
import math
import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import is_hypothesis_test, settings
from onnx import numpy_helper, parser

# Without compiled modules, each process that a test starts takes a second more to import its own.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline: a first call may have to compile a kernel. `--hypothesis-profile=thorough` tries all examples.
settings.register_profile("fast", deadline=None)
settings.register_profile("thorough", deadline=None)
settings.load_profile("fast")
FAST_SHARE, LEAST_EXAMPLES = 0.1, 10
"""Of the examples of a property, those that the fast tests try, and at least so many."""

# A shell starts background jobs with interrupts ignored, which tests of interrupts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two branches that any placer can put on two devices; nothing is measured, so that compiling takes milliseconds.
FAST_PIPELINE = "optimize,profile{estimate=true},coplace{join=never},m-etf,split,emit"

_CACHES = itertools.count()
CORES = 2
"""Of each process that runs tests, whatever the machine has, so that all see the same devices `cpu/1`.

ONNXPLACE_TEST_CORES=all lifts this, for finding what goes wrong with more.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Take two cores; each process of `pytest -n` takes others, where there are enough."""
    is_controller = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if is_controller or not hasattr(os, "sched_setaffinity") or os.environ.get("ONNXPLACE_TEST_CORES") == "all":
        return
    cores = sorted(os.sched_getaffinity(0))
    first = CORES * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {cores[(first + number) % len(cores)] for number in range(CORES)})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Count the cores that this process may use for `-n auto`; pytest-xdist takes two threads of a core for one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is collected out of garbage collections: it lives to the end, and going through it takes 0.2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test except one in N that has the mark `sampled(N)`, and try fewer examples."""
    counts: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            key = item.path, item.originalname
            if counts[key] % mark.args[0]:
                item.add_marker("slow")
            counts[key] += 1
    if settings.get_current_profile_name() != "thorough" and "ONNXPLACE_EXAMPLES" not in os.environ:
        limit_examples({item.function for item in items if isinstance(item, pytest.Function)})


def limit_examples(functions: set[Callable[..., object]]) -> None:
    """Let those functions that are properties try a share of their examples."""
    for function in filter(is_hypothesis_test, functions):
        own = getattr(function, "_hypothesis_internal_use_settings", settings.default)
        share = max(LEAST_EXAMPLES, round(FAST_SHARE * own.max_examples))
        function._hypothesis_internal_use_settings = settings(own, max_examples=min(own.max_examples, share))


BRANCHES = """
<ir_version: 8, opset_import: ["": 17]>
branches (float[batch, 64] x) => (float[batch, 64] y)
{
    [left] a = MatMul(x, w_left)
    [right] b = MatMul(x, w_right)
    [relu] c = Relu(a)
    [tanh] d = Tanh(b)
    [sum] y = Add(c, d)
}
"""


def branches(seed: int = 0) -> onnx.ModelProto:
    """Return a model of two branches: `x` [batch, 64] to `y` [batch, 64], two weights of 16 KiB."""
    model = parser.parse_model(BRANCHES)
    random = np.random.default_rng(seed)
    for name in ("w_left", "w_right"):
        array = random.standard_normal((64, 64)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def own_cost_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let each test measure for itself, and leave the user's cache alone."""
    monkeypatch.setenv("ONNXPLACE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / f"cache-{next(_CACHES)}"))


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let no test meet, sweep and report what processes outside of these tests left among temporary files."""
    folder = tmp_path_factory.getbasetemp() / "temporary"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))


@pytest.fixture(autouse=True)
def good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let costs and trials of a machine that is busy with other tests be good enough soon, and never doubted."""
    from onnxplace.measure import trial

    monkeypatch.setattr("onnxplace.machine.repeated_runs.MIN_SECONDS", 0.0)
    monkeypatch.setattr("onnxplace.passes.profiling.node_measurement.MAX_EVENTS", 0)  # three runs with the profiler
    monkeypatch.setattr(trial, "REPEAT_POLICY", replace(trial.REPEAT_POLICY, max_runs=trial.REPEAT_POLICY.min_runs))
    monkeypatch.setattr("onnxplace.passes.profiling.profile_model.DOUBTFUL_WAITING_SHARE", 1.0)
    monkeypatch.setattr("onnxplace.measure.trial.DOUBTFUL_WAITING_SHARE", 1.0)
    monkeypatch.setattr("onnxplace.machine.measurement_cache.MAX_SLOWDOWN", math.inf)
    monkeypatch.setattr("onnxplace.driver.trials.CREDIBLE_SUM", math.inf)


class LocalProcess:
    """Stands in for the child process that compares other sizes: a start takes half a second."""

    def __init__(self, *_: object) -> None:
        self.ended, self.sessions, self._opened = threading.Event(), {}, {}

    def start(self) -> None:
        """Do nothing: it is this process."""

    def call(self, _: str, function: Callable[..., object], number: int, *arguments: object) -> object:
        return function(self._opened, number, None, *arguments)

    def drop(self, _: int) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def local_comparisons(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare other sizes in this process, unless a test has the mark `child_comparisons`."""
    if not request.node.get_closest_marker("child_comparisons"):
        monkeypatch.setattr("onnxplace.measure.size_comparison.DeviceProcess", LocalProcess)


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands print the same however long they take: on a slow machine, lines would say how far they are."""
    monkeypatch.setattr("onnxplace.cli.terminal.LINE_SECONDS", math.inf)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command in this process. An exception that escapes is a traceback for the user, and fails the test."""
    from onnxplace.cli.app import main

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of this machine, so that the default devices are cpu:0 and cpu:1."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture(scope="session")
def branches_bytes() -> bytes:
    return branches().SerializeToString()


@pytest.fixture
def model_file(tmp_path: Path, branches_bytes: bytes) -> Path:
    """A file with the model of two branches; its dimension `batch` is symbolic."""
    path = tmp_path / "model.onnx"
    path.write_bytes(branches_bytes)
    return path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, branches_bytes: bytes) -> Path:
    """A bundle for two devices, made once: read it, copy it, do not alter it."""
    from onnxplace.driver.compile import compile_model

    folder = tmp_path_factory.mktemp("compiled")
    (folder / "model.onnx").write_bytes(branches_bytes)
    found = compile_model(
        folder / "model.onnx",
        folder / "bundle",
        devices="cpu:0,cpu:1",
        shape={"batch": 4},
        pipeline=FAST_PIPELINE,
        strict=True,
    )
    return found.bundle.path


@pytest.fixture
def bundle_copy(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the compiled bundle that a test may damage."""
    return shutil.copytree(compiled, tmp_path / "bundle")


@pytest.fixture(scope="session")
def fast_pipeline() -> str:
    return FAST_PIPELINE
