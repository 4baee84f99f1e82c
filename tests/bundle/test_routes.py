"""Routes of bundles: every way through a bundle computes the same, and damaged routes are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.bundle.bundle import Bundle, extract_device_part, record_crossing_values
from onnxplace.bundle.bundle_routes import list_route_devices, list_routes, move_to_route, sum_device_seconds
from onnxplace.bundle.manifest import RouteRecord
from onnxplace.bundle.manifest_checks import check_programs, check_routes
from onnxplace.errors import BundleError
from onnxplace.target.target import Device, Target
from tests.bundle.test_slices import FEEDS, MAP, TOWERS

DEVICES = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def copied(folder: Path, routes: str, **options) -> Bundle:
    """Return a bundle with segments on cpu:0 and cpu:1, and these further routes."""
    folder.mkdir(exist_ok=True)
    (folder / "map.json").write_text(MAP)
    onnx.save(parser.parse_model(TOWERS), folder / "m.onnx")
    place = f"coplace{{join=never,device_map={folder / 'map.json'}}},m-etf,split"
    steps = f"optimize,profile{{estimate=true}},{place},replicate{{routes={routes}}},emit"
    target = Target(tuple(Device(name, 1 << 30) for name in DEVICES))
    return onnxplace.compile(
        folder / "m.onnx", folder / "bundle", target=target, shape={"n": 3}, pipeline=steps, **options
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return copied(tmp_path_factory.mktemp("routes"), "cpu:2+cpu:3;cpu:0+cpu:2")


def test_the_programs_themselves_are_the_first_route(bundle):
    first, second, third = list_routes(bundle.manifest)
    assert dict(first.devices) == {"cpu:0": "cpu:0", "cpu:1": "cpu:1"}
    assert dict(second.devices) == {"cpu:0": "cpu:2", "cpu:1": "cpu:3"}
    assert dict(third.devices) == {"cpu:0": "cpu:0", "cpu:1": "cpu:2"}
    assert first.share + second.share + third.share == pytest.approx(1)
    assert list_route_devices(bundle.manifest) == DEVICES


def test_a_bundle_without_the_field_has_one_route(bundle):
    old = json.loads(bundle.manifest.model_dump_json())
    del old["routes"]
    (route,) = list_routes(type(bundle.manifest).model_validate(old))
    assert route.share == 1


def test_each_route_alone_is_a_bundle_that_runs(bundle):
    expected = None
    for route in list_routes(bundle.manifest):
        moved = replace(bundle, manifest=move_to_route(bundle.manifest, route))
        check_programs(moved.manifest, bundle.path)
        assert {segment.device for segment in moved.manifest.segments} == set(route.devices.values())
        with onnxplace.InferenceSession(moved, trace=True) as session:
            outputs = session.run(None, FEEDS)
            (timeline,) = session.list_timelines()
        assert {event.device for event in timeline.events} == set(route.devices.values())
        expected = expected or outputs
        for output, value in zip(outputs, expected):
            np.testing.assert_array_equal(output, value)


def test_a_device_without_own_program_has_the_part_of_its_route(bundle):
    part = extract_device_part(bundle, "cpu:3")
    own = extract_device_part(bundle, "cpu:1")
    assert [item.name for item in part.inputs] == [item.name for item in own.inputs]
    assert {segment.device for segment in part.manifest.segments} == {"cpu:3"}
    assert part.manifest.routes == record_crossing_values(bundle).manifest.routes == ()


def test_device_records_count_the_segments_of_all_routes(bundle):
    records = {record.id: record for record in bundle.manifest.devices}
    first, second = records["cpu:0"], records["cpu:1"]
    assert records["cpu:3"].nodes == second.nodes
    assert records["cpu:2"].nodes == first.nodes + second.nodes, "it takes the place of both"
    assert records["cpu:2"].peak_bytes >= max(first.peak_bytes, second.peak_bytes)
    assert min(record.compute_seconds for record in records.values()) > 0
    assert sum_device_seconds(bundle.manifest)["cpu:3"] == pytest.approx(records["cpu:3"].compute_seconds)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": {"cpu:0": "cpu:2"}}, "the programs for cpu:0, cpu:1"),
        ({"devices": {"cpu:0": "cpu:2", "cpu:1": "cpu:9"}}, "cpu:9, which the target does not have"),
        ({"devices": {"cpu:0": "cpu:2", "cpu:1": "cpu:2"}}, "two programs to one device"),
        ({"devices": {"cpu:0": "cpu:0", "cpu:1": "cpu:1"}}, "is there twice"),
        ({"devices": {"cpu:0": "cpu:0", "cpu:1": "cpu:2"}}, "is there twice"),
        ({"seconds": {}}, "expected one per segment"),
        ({"share": 0.9}, "expected shares of at most 1"),
    ],
)
def test_damaged_routes_are_refused_with_the_reason(bundle, changes, words):
    first, second = bundle.manifest.routes
    routes = (RouteRecord(**{**first.model_dump(), **changes}), second.model_copy(update={"share": 0.5}))
    damaged = bundle.manifest.model_copy(update={"routes": routes})
    with pytest.raises(BundleError, match="N002") as raised:
        check_routes(damaged, Path("manifest.json"))
    assert words in raised.value.message


@settings(max_examples=25)
@given(st.permutations(range(4)), st.integers(0, 4))
def test_a_route_and_its_inverse_give_the_programs_back(bundle, order, number):
    stand_ins = dict(zip(("cpu:0", "cpu:1"), (DEVICES[index] for index in order)))
    manifest = bundle.manifest
    route = RouteRecord(devices=stand_ins, seconds=list_routes(manifest)[0].seconds, share=0.1)
    moved = move_to_route(manifest, route)
    back = RouteRecord(devices={new: old for old, new in stand_ins.items()}, seconds=route.seconds, share=0.1)
    assert move_to_route(moved, back).programs == manifest.programs
