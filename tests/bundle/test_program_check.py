"""The dry run of programs: programs that pass run to their ends in any order of workers, with the right results."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.bundle.manifest import Step
from onnxplace.bundle.manifest_checks import check_programs
from onnxplace.errors import BundleError
from tests.support.fuzzing import fuzzed

DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def manifest(
    segments: dict[str, tuple[str, list[str], list[str]]],
    programs: dict[str, list[str]],
    outputs: str,
    inputs: str = "x",
) -> Any:
    """Return a manifest with the fields that the check reads; steps are texts such as `run a`, `send v cpu:1`."""
    producers = {value: name for name, (_, _, makes) in segments.items() for value in makes}
    read = {value for _, reads, _ in segments.values() for value in reads}
    return SimpleNamespace(
        segments=[
            SimpleNamespace(id=name, device=device, inputs=tuple(reads), outputs=tuple(makes))
            for name, (device, reads, makes) in segments.items()
        ],
        inputs=[SimpleNamespace(name=name) for name in inputs.split()],
        outputs=[SimpleNamespace(name=name, value=name) for name in outputs.split()],
        states=[],
        values={name: SimpleNamespace(producer=producers.get(name)) for name in sorted(read | producers.keys())},
        target=SimpleNamespace(devices=[SimpleNamespace(id=device) for device in DEVICES]),
        programs={device: tuple(step(text) for text in program) for device, program in programs.items()},
    )


def step(text: str) -> Step:
    op, *words = text.split()
    names = ["segment"] if op == "run" else ["value", "peer"]
    return Step(op=op, **dict(zip(names, words)))


def refusal(checked: Any) -> str:
    with pytest.raises(BundleError, match="N002") as raised:
        check_programs(checked, Path("manifest.json"))
    return raised.value.message


TWO_SENDERS = {
    "a": ("cpu:0", ["x"], ["v"]),
    "b": ("cpu:1", ["x"], ["w"]),
    "c": ("cpu:2", ["v", "w"], ["y"]),
}


def test_two_devices_that_send_one_value_to_a_third_are_refused():
    """The runtime identifies transfers by value and destination: the second would replace the first, or stay unread."""
    programs = {
        "cpu:0": ["run a", "send v cpu:2", "send v cpu:1"],
        "cpu:1": ["run b", "receive v cpu:0", "send v cpu:2", "send w cpu:2"],
        "cpu:2": ["receive v cpu:0", "receive v cpu:1", "receive w cpu:1", "run c"],
    }
    assert "'v' is sent to cpu:2 twice, by cpu:0 and cpu:1" in refusal(manifest(TWO_SENDERS, programs, "y"))


GOOD = {
    "cpu:0": ["run a", "send v cpu:2"],
    "cpu:1": ["run b", "send w cpu:2"],
    "cpu:2": ["receive w cpu:1", "receive v cpu:0", "run c"],
}


@pytest.mark.parametrize(
    ("device", "program", "message"),
    [
        ("cpu:2", ["receive w cpu:0", "receive v cpu:0", "run c"], "cpu:2 is to receive 'w' from 'cpu:0', but cpu:1"),
        ("cpu:2", ["receive v cpu:0", "run c", "receive w cpu:1"], "segment c on cpu:2 needs 'w'"),
        (
            "cpu:2",
            [*GOOD["cpu:2"], "receive v cpu:0"],
            "cpu:2 is to receive 'v', which it has already received or computed",
        ),
        (
            "cpu:2",
            [*GOOD["cpu:2"], "free v", "receive v cpu:0"],
            "cpu:2 is to receive 'v', which it has already received or computed",
        ),
        ("cpu:2", [*GOOD["cpu:2"], "receive q cpu:0"], "cpu:2 waits for 'q' forever"),
        ("cpu:2", [*GOOD["cpu:2"], "send x cpu:0"], "cpu:2 is to send 'x', which it does not have"),
        ("cpu:0", ["run a", "send v cpu:2", "send x cpu:1"], "an input of the model, which is fed to each device"),
        ("cpu:0", ["run a", "send v cpu:2", "free v", "free v"], "cpu:0 is to free 'v', which it does not have"),
        ("cpu:0", ["run a", "send v cpu:2", "send v cpu:0"], "cpu:0 is to send 'v' to 'cpu:0'"),
    ],
)
def test_programs_are_refused_with_the_failure_at_run_time(device, program, message):
    check_programs(manifest(TWO_SENDERS, GOOD, "y"), Path("manifest.json"))
    assert message in refusal(manifest(TWO_SENDERS, {**GOOD, device: program}, "y"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": ("cpu:1", ["x"], ["v"])}, "value 'v' has two producers, the second is segment b"),
        ({"b": ("cpu:1", ["x"], ["x"])}, "value 'x' has two producers"),
    ],
)
def test_a_value_has_one_producer(change, message):
    assert message in refusal(manifest({**TWO_SENDERS, **change}, GOOD, "y"))


def test_each_value_is_listed_with_its_true_producer():
    checked = manifest(TWO_SENDERS, GOOD, "y")
    checked.values["w"].producer = "a"
    assert "value 'w' names the producer 'a', which does not compute it" in refusal(checked)
    checked.values["w"].producer = None
    assert "value 'w' names no producer, but segment 'b' computes it" in refusal(checked)
    del checked.values["w"]
    assert "value 'w' is not listed among the values" in refusal(checked)


def test_names_of_segments_and_inputs_are_unique():
    twice = manifest(TWO_SENDERS, GOOD, "y")
    twice.segments.append(twice.segments[0])
    assert "two segments have the same id" in refusal(twice)
    assert "two inputs have the same name" in refusal(manifest(TWO_SENDERS, GOOD, "y", inputs="x x"))


def test_checking_takes_time_proportional_to_the_programs():
    """A token goes round: each device waits for the previous one, and the first program is that of the last device."""
    devices = [f"cpu:{index}" for index in range(400)]
    rounds = 25
    segments, programs = {}, {device: [] for device in reversed(devices)}
    before, home = "x", ""
    for number in range(rounds * len(devices)):
        device = devices[number % len(devices)]
        segments[f"s{number}"] = (device, [before], [f"v{number}"])
        if home:
            programs[home].append(f"send {before} {device}")
            programs[device].append(f"receive {before} {home}")
        programs[device].append(f"run s{number}")
        before, home = f"v{number}", device
    checked = manifest(segments, programs, before)
    checked.target.devices = [SimpleNamespace(id=device) for device in devices]
    check_programs(checked, Path("manifest.json"))


@st.composite
def networks(draw: st.DrawFn) -> Any:
    """Return a chain of segments, mostly valid, and programs with some steps moved, removed or duplicated."""
    count = draw(st.integers(1, 6))
    segments, programs, homes = {}, {device: [] for device in DEVICES}, {"x": ""}
    for index in range(count):
        device = draw(st.sampled_from(DEVICES))
        reads = draw(st.lists(st.sampled_from(sorted(homes)), min_size=1, max_size=2, unique=True))
        for value in reads:
            home = homes[value]
            if home not in ("", device) and f"receive {value} {home}" not in programs[device]:
                programs[home].append(f"send {value} {device}")
                programs[device].append(f"receive {value} {home}")
        programs[device].append(f"run s{index}")
        segments[f"s{index}"] = (device, reads, [f"v{index}"])
        homes[f"v{index}"] = device
    for _ in range(draw(st.integers(0, 3))):
        program = programs[draw(st.sampled_from(DEVICES))]
        if not program:
            continue
        step = program.pop(draw(st.integers(0, len(program) - 1)))
        for _ in range(draw(st.integers(0, 2))):
            destination = programs[draw(st.sampled_from(DEVICES))]
            destination.insert(draw(st.integers(0, len(destination))), step)
    return manifest(segments, programs, f"v{count - 1}")


def run_in_random_order(checked: Any, order: random.Random) -> set[str]:
    """Follow the programs in a random order as workers do, by value and destination; return the devices that hang."""
    inputs = {item.name for item in checked.inputs}
    segments = {segment.id: segment for segment in checked.segments}
    values = {
        device: {v for s in checked.segments if s.device == device for v in s.inputs} & inputs for device in DEVICES
    }
    arrived: dict[str, set[str]] = {device: set() for device in DEVICES}
    remaining = {device: list(program) for device, program in checked.programs.items()}
    while True:
        ready = [
            device for device, steps in remaining.items()
            if steps and (steps[0].op != "receive" or steps[0].value in arrived[device])
        ]  # fmt: skip
        if not ready:
            return {device for device, steps in remaining.items() if steps}
        device = order.choice(ready)
        step = remaining[device].pop(0)
        if step.op == "run":
            assert set(segments[step.segment].inputs) <= values[device]
            values[device] |= set(segments[step.segment].outputs)
        elif step.op == "send":
            assert step.value in values[device]
            assert step.value not in arrived[step.peer], "it would replace a value that was not received"
            arrived[step.peer].add(step.value)
        elif step.op == "receive":
            arrived[device].remove(step.value)
            values[device].add(step.value)
        else:
            values[device].discard(step.value)


@settings(fuzzed, max_examples=3 * fuzzed.max_examples)
@given(networks(), st.integers(0, 1000))
def test_programs_that_pass_run_to_their_ends_in_any_order(checked: Any, seed: int):
    try:
        check_programs(checked, Path("manifest.json"))
    except BundleError:
        return
    order = random.Random(seed)
    for _ in range(5):
        assert not run_in_random_order(checked, order)


def test_a_bundle_whose_program_sends_twice_is_refused_by_the_command(run_cli, bundle_copy):
    file = bundle_copy / "manifest.json"
    data = json.loads(file.read_text())
    sends = next(program for program in data["programs"].values() if any(s["op"] == "send" for s in program))
    sends.append(next(s for s in sends if s["op"] == "send"))
    file.write_text(json.dumps(data))
    result = run_cli("run", bundle_copy)
    assert result.code == 2
    assert "N002" in result.err
