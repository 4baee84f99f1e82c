"""What reports say about alternatives: their steps are simulated, and two reports say what they decide differently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxplace.bundle.bundle import Bundle
from onnxplace.facts import LayoutAlternative
from onnxplace.reports.alternatives import describe_layouts
from onnxplace.reports.differences import compare_pages
from onnxplace.reports.layer_tree import LayerNode, build_layer_tree
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_rendering import render_page


def test_a_row_of_layouts_names_some_neighbours_and_counts_the_others():
    kept = LayoutAlternative(layout="axis 1", is_kept=True, seconds=0.002)
    other = LayoutAlternative(
        layout="whole",
        is_kept=False,
        seconds=0.0025,
        exchanges={"all-gather": 1, "halo": -2},
        neighbours=dict.fromkeys("abcde", "axis 1 -> axis 0"),
        others=4,
    )
    far = replace(other, neighbours={}, others=1, exchanges={})
    heavy = replace(far, seconds=None, others=0)
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
