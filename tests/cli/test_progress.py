"""Progress with the remaining time: live on a terminal, rare lines elsewhere; `--quiet` and `--verbose`."""

import io
import json
import re
import signal
import subprocess
import sys

import pytest

from onnxplace.cli import terminal
from onnxplace.cli.app import main
from onnxplace.utils.progress import observe_progress, progress_part, report_progress, report_time_limit
from tests.support.commands import FAST, load_all_commands
from tests.support.terminals import run_on_terminal

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

ESCAPE, CLEAR_LINE, HIDE_CURSOR = "\x1b", "\x1b[2K", "\x1b[?25l"
PLACE = ("graph.json", "--placer", "single", "--devices", "2")
LINE_SECONDS = terminal.LINE_SECONDS  # as users have it; tests never print such lines


@pytest.fixture
def graph_file(tmp_path):
    """A graph whose bound no placement reaches: a search ends with its time."""
    nodes = [{"id": str(index), "compute_time_us": 10.0 + index * 7 % 13, "output_bytes": 8} for index in range(60)]
    links = [(index, index + step) for step in (4, 5, 7) for index in range(60 - step)]
    edges = [{"src": str(source), "dst": str(target), "bytes": 10_000_000} for source, target in links]
    data = {"devices": [{"id": name, "memory_bytes": 1 << 30} for name in "ab"], "nodes": nodes, "edges": edges}
    (tmp_path / "graph.json").write_text(json.dumps(data))


class Clock:
    """A clock that a test sets, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


@pytest.mark.slow
def test_a_terminal_shows_the_remaining_time_and_clears_it(graph_file):
    shown, code = run_on_terminal("place", "graph.json", "--placer", "multilevel{seconds=4,proposals=1000000000}")
    assert code == 0, shown
    assert re.search(r"placing .*\d:\d\d left", shown)
    live, _, result = shown.rpartition(CLEAR_LINE)
    assert "left" in live
    assert "placing" not in result  # nothing of the line is left above the result
    assert "60 nodes, placer multilevel" in result
    assert HIDE_CURSOR not in shown


def test_an_interrupt_leaves_a_clean_terminal(graph_file):
    arguments = ("place", "graph.json", "--placer", "multilevel{seconds=3600,proposals=1000000000}")
    shown, code = run_on_terminal(*arguments, until=" left", act=lambda child: child.send_signal(signal.SIGINT))
    assert code == 130
    _, _, end = shown.rpartition(CLEAR_LINE)
    assert "placing" not in end
    assert "interrupted" in end
    assert HIDE_CURSOR not in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"CI": "true"}])
def test_terminals_that_cannot_redraw_and_logs_of_ci_get_no_control_characters(graph_file, variables):
    shown, code = run_on_terminal("place", *PLACE, environment=variables)
    assert code == 0, shown
    assert ESCAPE not in shown


def test_no_color_means_no_colours(graph_file):
    shown, code = run_on_terminal("place", *PLACE, environment={"NO_COLOR": "1"})
    assert code == 0
    assert "placing" in shown
    assert re.findall(r"\x1b\[[0-9;]*m", shown) == []


def test_a_pipe_gets_no_control_characters_and_rare_plain_lines(run_cli, model_file, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", LINE_SECONDS)
    assert run_cli("compile", model_file, *FAST, "-o", "first").err.count("\n[") == 0
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    result = run_cli("compile", model_file, *FAST, "-o", "second")
    assert result.code == 0
    assert ESCAPE not in result.err + result.out
    assert "[2/6] profile" in result.err
    assert "[2/6]" not in result.out


def test_quiet_says_nothing_but_errors(run_cli, model_file, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    result = run_cli("compile", model_file, *FAST, "-o", "quiet", "--quiet")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("branches: 5 nodes")
    assert run_cli("compile", "missing.onnx", "-q").err.startswith("error[M001]")


def test_verbose_prints_each_step_with_its_time(run_cli, model_file):
    result = run_cli("compile", model_file, *FAST, "-v", "--json")
    passes = ("optimize", "profile", "coplace", "m-etf", "split", "emit")
    assert list(read_parts(result.err)) == [
        "starting", "reading the model", "checking operators and paths",
        *(f"[{n}/6] {name}" for n, name in enumerate(passes, 1)),
        "putting the bundle in place", "ending",
    ]  # fmt: skip
    assert re.search(r"^compile: \d+\.\d\d s in all$", result.err, re.MULTILINE)
    json.loads(result.out)


def read_parts(text: str) -> dict[str, float]:
    """Return the seconds of each part that `--verbose` prints."""
    return {name: float(seconds) for name, seconds in re.findall(r"^([^:\n]+): (\d+\.\d\d) s$", text, re.MULTILINE)}


@pytest.mark.parametrize(
    "command",
    [
        ("compile", "model.onnx", *FAST, "-o", "out"),
        ("compile", "model.onnx", "--devices", "cpu:0,cpu:1"),
        ("place", *PLACE),
        ("plan", "model.onnx", "--devices", "cpu:0,cpu:1", "--effort", "low"),
    ],
    ids=lambda command: " ".join(command[:1]),
)
def test_the_parts_of_a_command_add_up_to_its_whole_time(run_cli, model_file, graph_file, command):
    names = {"model.onnx": str(model_file)}
    error = run_cli(*(names.get(item, item) for item in command), "-v").err
    whole = re.search(rf"^{command[0]}: (\d+\.\d\d) s in all$", error, re.MULTILINE)
    assert whole, error
    assert sum(read_parts(error).values()) == pytest.approx(float(whole[1]), abs=1e-6)


def test_the_time_of_a_process_counts_from_its_start():
    """A process that waits before it imports anything has waited as a part of its command."""
    script = (
        "import runpy, sys, time; time.sleep(0.5); sys.argv = ['onnxplace', 'explain', 'P010', '-v'];"
        "runpy.run_module('onnxplace', run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    whole = re.fullmatch(r"explain: (\d+\.\d\d) s in all\n", process.stderr)
    assert whole, process.stderr
    assert float(whole[1]) >= 0.5 or sys.platform != "linux"


@pytest.mark.parametrize("times", [(0.004,) * 9, (1.005, 0.001, 2.0049), (0.0, 0.019, 0.019)])
def test_rounded_parts_add_up_to_the_rounded_whole(clock, times):
    parts = terminal.PartClock(clock.now)
    seconds = []
    for step in times:
        clock.now += step
        seconds.append(float(parts.end_part().removesuffix(" s")))
    assert sum(seconds) == pytest.approx(parts.seconds, abs=1e-9)
    assert parts.seconds == pytest.approx(sum(times), abs=0.005 + 1e-9)


def test_quiet_and_verbose_exclude_each_other(run_cli):
    result = run_cli("passes", "-q", "-v")
    assert result.code == 2
    assert "--quiet and --verbose exclude each other" in result.err


def list_commands(commands):
    for command in commands.values():
        yield from list_commands(command.commands) if hasattr(command, "commands") else [command]


@pytest.mark.parametrize("command", list(list_commands(load_all_commands())), ids=lambda command: command.name)
def test_every_command_has_quiet_and_verbose(command):
    options = [option for parameter in command.params for option in parameter.opts]
    assert {"-q", "--quiet", "-v", "--verbose"} <= set(options)
    assert len(options) == len(set(options))


def test_the_remaining_time_follows_from_the_finished_share(clock):
    display = terminal.Display("work")
    assert display.estimate_remaining() is None
    clock.now += 10
    display.advance(0.25)
    assert display.estimate_remaining() == pytest.approx(30)
    clock.now += 1
    display.advance(0.1)  # a share never shrinks
    assert display.share == 0.25
    display("next", 1, 3)
    assert display.describe() == "[2/3] next"
    assert display.estimate_remaining() is None


def test_a_time_limit_is_the_remaining_time_until_shares_are_known(clock):
    display = terminal.Display("search")
    display.limit(20.0)
    clock.now += 5
    assert (display.estimate_remaining(), display.total_share) == (15, 0.25)
    clock.now += 30
    assert display.describe_remaining() == "0:00 left"


def test_a_time_limit_bounds_what_follows_from_the_share(clock):
    display = terminal.Display("search")
    clock.now += 60  # preparations
    display.limit(8.0)
    clock.now += 1
    display.advance(0.125)
    assert display.estimate_remaining() == pytest.approx(7)
    clock.now += 1
    display.advance(0.95)  # the number of proposals ends it earlier
    assert display.estimate_remaining() == pytest.approx(62 * 0.05 / 0.95)


def test_preparations_before_the_first_report_say_nothing_about_the_speed(clock):
    display = terminal.Display("learning")
    clock.now += 60
    display.advance(0)
    clock.now += 1
    display.advance(0.1)
    assert display.estimate_remaining() == pytest.approx(9)


def test_a_plan_shows_no_remaining_time_that_other_strategies_would_have(run_cli, model_file, monkeypatch, clock):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(clock, "monotonic", lambda: (setattr(clock, "now", clock.now + 1), clock.now)[1])
    result = run_cli("plan", model_file, "--estimate", "--devices", "cpu:0,cpu:1", "--shape", "batch=1")
    assert re.search(r"\[3/\d+\] 2 copies of the model\n", result.err), result.err


def test_similar_steps_share_one_remaining_time(clock):
    display = terminal.Display("start", similar=True)
    clock.now += 100
    display("first", 0, 4)
    clock.now += 10
    display("second", 1, 4)
    assert display.estimate_remaining() == pytest.approx(30)
    display.advance(0.5)
    assert display.total_share == 0.375


def test_what_was_done_earlier_says_nothing_about_the_speed(clock):
    display = terminal.Display("train")
    display.resume_at(0.5)
    assert display.estimate_remaining() is None
    clock.now += 10
    display.advance(0.75, "step 75 of 100")
    assert display.estimate_remaining() == pytest.approx(10)
    assert display.describe() == "train: step 75 of 100"


def test_lines_are_rare_and_say_what_is_left(clock, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", LINE_SECONDS)
    display = terminal.LineDisplay("verify")
    for _ in range(12):
        clock.now += 2
        display.advance((clock.now - 100) / 40)
    assert capsys.readouterr().err == "verify, 15%, 0:34 left\nverify, 55%, 0:18 left\n"


class Recorder:
    def __init__(self) -> None:
        self.shares: list[float] = []
        self.limits: list[float] = []

    def advance(self, share: float) -> None:
        self.shares.append(share)

    def limit(self, seconds: float) -> None:
        self.limits.append(seconds)


def test_parts_of_parts_are_shares_of_the_whole():
    recorder = Recorder()
    with observe_progress(recorder):
        with progress_part(0, 2), progress_part(1, 2):
            report_progress(3, 6)
            report_time_limit(1.0)  # of a part: says nothing about the step
        report_time_limit(2.0)
    report_progress(1, 2)  # nobody listens
    assert recorder.shares == [0.375, 0.5, 0.5]
    assert recorder.limits == [2.0]


def test_names_are_not_read_as_markup(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown)
    with terminal.show_progress(False, "read [bold]a[/x]"):
        pass
    assert "read [bold]a[/x]" in shown.getvalue()


def test_a_failed_step_is_not_reported_as_finished(run_cli, tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    result = run_cli("compile", "bad.onnx", "-v")
    assert result.code == 2
    assert "reading the model" not in result.err


def test_main_returns_the_exit_code_with_options_of_verbosity_before_the_name():
    assert main(["passes", "-v", "--json"]) == 0
