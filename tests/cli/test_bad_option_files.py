"""Device maps, cost files and target files that make no sense are refused."""

import json
from pathlib import Path

import pytest

from tests.support.bad_input import SHAPE

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.mark.parametrize(
    ("text", "expected_words"),
    [
        ('{"none_such.*": "cpu:0"}', ("map.json", "none_such.*", "'left'")),
        ('{"left": "cpu:7"}', ("'cpu:7'", "did you mean 'cpu:1'?")),
        ('{"left": "tpu:0"}', ("'tpu:0'", "cpu:0")),
        ('{"(": "cpu:0"}', ("map.json", "regular expression")),
        ('{"left": 3}', ("map.json", "no device 3", "'left'", "cpu:0, cpu:1")),
        ('{"left.*": 3}', ("map.json", "not a device map", "cuda:0")),
        ('["left"]', ("map.json", "not a device map", "cuda:0")),
        ('{"left":', ("map.json", "not a device map")),
    ],
)
def test_a_wrong_device_map_is_refused(refused, model_file, text, expected_words):
    (model_file.parent / "map.json").write_text(text)
    refused(2, expected_words, "compile", model_file, *SHAPE, "--device-map", "map.json")


def test_a_device_map_that_is_missing_is_named(refused, model_file):
    refused(2, ("nowhere.json", "no such file"), "compile", model_file, *SHAPE, "--device-map", "nowhere.json")


def test_colocating_what_the_device_map_separates_is_refused(refused, model_file):
    (model_file.parent / "map.json").write_text('{"left": "cpu:0", "right": "cpu:1"}')
    options = ("--device-map", "map.json", "--colocate", "left|right")
    refused(2, ("left|right", "device map", "'right'"), "compile", model_file, *SHAPE, *options)


def test_a_pattern_with_a_semicolon_stays_one_pattern(refused, model_file):
    refused(2, ("'left;right'",), "compile", model_file, *SHAPE, "--colocate", "left;right")


def test_one_device_cannot_hold_what_the_map_puts_on_two(refused, model_file):
    (model_file.parent / "map.json").write_text('{"left": "cpu:0", "right": "cpu:1"}')
    options = ("--device-map", "map.json", "--placer", "single")
    refused(3, ("cpu:0 and cpu:1", "--placer"), "compile", model_file, *SHAPE, *options)


def damaged_costs(compiled: Path, path: tuple[str, ...], value: object) -> str:
    costs = json.loads((compiled / "costs.json").read_text())
    part = costs
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return json.dumps(costs)


def cost_class(compiled: Path) -> str:
    return next(iter(json.loads((compiled / "costs.json").read_text())["nodes"]["left"]["seconds"]))


@pytest.mark.parametrize(
    ("path", "value", "expected_words"),
    [
        (("format",), "other", ("not a cost file", "costs.json")),
        (("version",), 99, ("version", "99")),
        (("nodes",), {}, ("5 of 5 nodes", "left")),
        (("nodes", "left", "seconds"), {}, ("no seconds", "'left'")),
        (("nodes", "left", "seconds", "CLASS"), -1.0, ("'left'", "-1.0")),
        pytest.param(
            ("nodes", "left"),
            5,
            ("'left'",),
        ),
        pytest.param(
            ("nodes", "left", "unit"),
            "x",
            ("'left'",),
        ),
        pytest.param(
            ("nodes", "left", "seconds"),
            [],
            ("'left'",),
        ),
        pytest.param(
            ("value_bytes",),
            [],
            ("value_bytes",),
        ),
        pytest.param(
            ("value_bytes", "a"),
            "x",
            ("value_bytes",),
        ),
        pytest.param(
            ("value_bytes", "a"),
            -5,
            ("value_bytes",),
        ),
        pytest.param(
            ("whole_seconds",),
            3,
            ("whole_seconds",),
        ),
    ],
    ids=str,
)
def test_a_wrong_entry_of_a_cost_file_is_refused(refused, model_file, compiled, path, value, expected_words):
    path = tuple(cost_class(compiled) if key == "CLASS" else key for key in path)
    (model_file.parent / "mine.json").write_text(damaged_costs(compiled, path, value))
    refused(2, ("mine.json", *expected_words), "compile", model_file, *SHAPE, "--costs", "mine.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_file_without_costs_is_refused(refused, model_file, text):
    (model_file.parent / "mine.json").write_text(text)
    refused(2, ("mine.json", "not a cost file"), "compile", model_file, *SHAPE, "--costs", "mine.json")


DEVICE = '[[devices]]\nid = "{}"\nmemory_bytes = {}\n'
LINK = '[[links]]\nsource = "{}"\ndestination = "{}"\nlatency_seconds = {}\nbytes_per_second = {}\n'
TWO = DEVICE.format("cpu:0", 10**9) + DEVICE.format("cpu:1", 10**9)


@pytest.mark.parametrize(
    ("text", "expected_words"),
    [
        ("x = ", ("not TOML",)),
        (DEVICE.format("tpu:0", 1), ("tpu:0", "did you mean 'cpu:0'?")),
        (TWO + DEVICE.format("cpu:0", 1), ("twice", "cpu:0")),
        (TWO + LINK.format("cpu:0", "cpu:2", 1.0, 1.0), ("'cpu:2'", "cpu:")),
        ("", ("empty", "cpu:0")),
        pytest.param(
            '[[devices]]\nid = "cpu:0"\n',
            ("memory_bytes",),
        ),
        pytest.param(
            'link_model = "odd"\n' + TWO,
            ("link_model", "'duplex'"),
        ),
        pytest.param(
            "devices = 3",
            ("devices",),
        ),
        pytest.param(
            TWO + "speed = 3\n",
            ("speed",),
        ),
        pytest.param(
            "[[device]]\n",
            ("'device'",),
        ),
        pytest.param(
            DEVICE.format("cpu:0", -1),
            ("memory_bytes", "-1"),
        ),
        pytest.param(
            TWO + "cores = 0\n",
            ("cores",),
        ),
        pytest.param(
            TWO + "segment_seconds = -1.0\n",
            ("segment_seconds",),
        ),
        pytest.param(
            TWO + LINK.format("cpu:0", "cpu:1", 1.0, 0.0),
            ("bytes_per_second",),
        ),
    ],
)
def test_a_wrong_target_file_is_refused(refused, model_file, fast_pipeline, text, expected_words):
    (model_file.parent / "t.toml").write_text(text)
    refused(2, expected_words, "compile", model_file, *SHAPE, "--target", "t.toml", "--pipeline", fast_pipeline)


def test_a_target_file_that_is_missing_is_named(refused, model_file):
    refused(2, ("nowhere.toml", "no such file"), "compile", model_file, *SHAPE, "--target", "nowhere.toml")


def test_a_bad_device_in_a_target_file_is_reported_with_the_file(refused, model_file):
    (model_file.parent / "t.toml").write_text(DEVICE.format("tpu:0", 1))
    assert "--devices" not in refused(2, ("t.toml",), "compile", model_file, *SHAPE, "--target", "t.toml")
