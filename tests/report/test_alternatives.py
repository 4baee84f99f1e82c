"""What reports say about alternatives: their steps are simulated, and two reports say what they decide differently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.bundle import Bundle, LayoutAlternativeRecord, ShardedKindRecord, ShardingRecord
from onnxplace.driver import compile_model
from onnxplace.reports import compare_pages, describe_bundle, describe_difference, describe_layouts, render_page
from onnxplace.reports.alternatives import MAX_LISTED_DEVICES, MAX_MOVED, tabulate_alternatives
from onnxplace.reports.layer_tree import LayerNode, build_layer_tree
from onnxplace.simulation import simulate
from tests.report.placed_graphs import draw_graph, place_at_random
from tests.support.chains import mlp


@settings(max_examples=20)
@given(nodes=st.integers(2, 40), seed=st.integers(0, 10_000), devices=st.integers(2, 6))
def test_rows_are_the_most_expensive_nodes_with_simulated_steps(nodes, seed, devices):
    step = place_at_random(draw_graph(nodes, seed, devices), seed)
    names = [f"node {index}" for index in range(len(step.graph))]
    (table,) = tabulate_alternatives(step, names)
    own = step.simulation.finish_seconds - step.simulation.start_seconds
    assert len(table.rows) == min(MAX_MOVED, len(names))
    times = [own[names.index(row[0])] for row in table.rows]
    assert times == sorted(own, reverse=True)[:MAX_MOVED]
    name, _, home, moves = table.rows[0]
    assert home == step.device_names[step.device[names.index(name)]]
    assert home not in [text.split(" on ")[1] for text in moves.split(", ")]
    steps = []
    for device in range(devices):
        if step.device_names[device] != home:
            moved = np.where(np.array(names) == name, device, step.device).astype(np.int32)
            steps.append(simulate(step.graph, step.seconds, step.target, moved, step.order).makespan_seconds)
    nearest = [describe_difference(item, step.simulation.makespan_seconds) for item in sorted(steps)]
    assert [text.split(" on ")[0] for text in moves.split(", ")] == nearest[:MAX_LISTED_DEVICES]


def test_one_device_has_no_alternatives():
    assert tabulate_alternatives(place_at_random(draw_graph(5, 1, devices=1), 1), ["?"] * 5) == ()


def test_unknown_times_on_other_devices_are_a_dash():
    step = place_at_random(draw_graph(4, 1, devices=2), 1)
    known = np.arange(len(step.target.devices))[:, None] == step.device[None, :]
    (table,) = tabulate_alternatives(replace(step, seconds=np.where(known, step.seconds, np.nan)), list("abcd"))
    assert {row[3] for row in table.rows} == {"–"}


def test_a_row_of_layouts_names_some_neighbours_and_counts_the_others():
    kept = LayoutAlternativeRecord(layout="axis 1", is_kept=True, seconds=0.002)
    other = LayoutAlternativeRecord(
        layout="whole",
        is_kept=False,
        seconds=0.0025,
        exchanges={"all-gather": 1, "halo": -2},
        neighbours=dict.fromkeys("abcde", "axis 1 -> axis 0"),
        others=4,
    )
    far = replace_record(other, neighbours={}, others=1, exchanges={})
    heavy = replace_record(far, seconds=None, others=0)
    assert list(describe_layouts([kept, other, far, heavy])) == [
        ("axis 1", "2 ms, kept", "", ""),
        (
            "whole",
            "500 µs longer",
            "+1 all-gather, -2 halo",
            "a: axis 1 -> axis 0; b: axis 1 -> axis 0; c: axis 1 -> axis 0; 6 more nodes",
        ),
        ("whole", "500 µs longer", "", "1 node"),
        ("whole", "impossible", "", ""),
    ]


def replace_record(record: LayoutAlternativeRecord, **changes: object) -> LayoutAlternativeRecord:
    return record.model_copy(update=changes)


def test_the_page_shows_layouts_where_operators_are_split_and_else_segments(compiled):
    bundle = Bundle.open(compiled)
    (table,) = describe_bundle(bundle).alternatives
    assert table.header[2] == "is on"
    assert table.rows[0][0] in [item.title for item in describe_bundle(bundle).segments]
    layout = LayoutAlternativeRecord(layout="axis <1>", is_kept=True, seconds=0.002)
    kind = ShardedKindRecord(
        op="MatMul", layout="axis 1", count=2, seconds=0.5, node="<b>layer</b>", alternatives=(layout,)
    )
    sharding = ShardingRecord(ways=2, exchanges={}, kinds=(kind,))
    object.__setattr__(bundle, "manifest", bundle.manifest.model_copy(update={"sharding": sharding}))
    data = describe_bundle(bundle)
    (table,) = data.alternatives
    assert table.rows == (("MatMul <b>layer</b>", "axis <1>", "2 ms, kept", "", ""),)
    page = render_page([data])
    assert "MatMul &lt;b&gt;layer&lt;/b&gt;" in page
    assert 'href="#alternatives-0"' in page


def test_compile_compares_the_layouts_of_what_it_splits(tmp_path):
    result = compile_model(
        mlp(layers=2), tmp_path / "out", devices="cpu:0,cpu:1",
        pipeline="optimize,profile{estimate=true},shard{ways=2,exact=true},coplace{join=never},m-etf,split,emit",
    )  # fmt: skip
    sharding = result.bundle.manifest.sharding
    assert sharding is not None
    first = sharding.kinds[0]
    assert first.alternatives[0].is_kept
    assert first.alternatives[0].layout == first.layout
    (table,) = describe_bundle(result.bundle).alternatives
    assert table.rows[0][0] == f"{first.op} {first.node}"


def test_two_reports_name_the_nodes_on_other_devices(compiled):
    data = describe_bundle(Bundle.open(compiled))
    tree = data.layers
    moved = replace(data, layers=replace(tree, device=tuple(1 - item if item >= 0 else -1 for item in tree.device)))
    (table,) = compare_pages(data, moved).tables
    assert {row[:2] for row in table.rows} == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    assert sum(int(row[2]) for row in table.rows) == sum(item >= 0 for item in tree.node)
    assert compare_pages(data, data).tables == ()
    assert compare_pages(data, replace(moved, title="other")).tables == ()
    assert table.caption in render_page([data, moved])


@pytest.mark.parametrize("separator", ["/", "."])
def test_parts_of_a_node_are_one_and_groups_of_layers_no_part_of_its_name(compiled, separator):
    data = describe_bundle(Bundle.open(compiled))
    names = [separator.join(("model", f"block_{index}", "attention", part)) for index in range(3) for part in "qk"]
    whole = build_layer_tree([LayerNode(name, "MatMul", 0, 1.0, index) for index, name in enumerate(names)])
    parts = [f"{name}/shard{device}" for name in names for device in range(2)]
    split = build_layer_tree([LayerNode(name, "MatMul", index % 2, 1.0, index) for index, name in enumerate(parts)])
    (table,) = compare_pages(replace(data, layers=whole), replace(data, layers=split)).tables
    assert table.rows == (("cpu:0", "cpu:0+cpu:1", "6", "model/block_0, model/block_1, model/block_2"),)
