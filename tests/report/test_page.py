"""The HTML of reports: one file, no foreign addresses, and no text of a model that becomes markup or a script."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import onnx
import pytest

from onnxplace.bundle.bundle import Bundle, describe_step
from onnxplace.bundle.bundle_simulation import simulate_manifest
from onnxplace.bundle.manifest import ShardedKindRecord, ShardingRecord
from onnxplace.driver.compile import compile_model
from onnxplace.errors import Diagnostic, UsageError
from onnxplace.measure.trial import Trial, apply_trial
from onnxplace.reports.page_data import describe_bundle
from onnxplace.reports.page_records import Advice, Entry, MemoryItem, Note, Quantity
from onnxplace.reports.page_rendering import group_memory, render_page
from tests.support.dynamo_models import dynamo_model

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}<!--"


class Page(HTMLParser):
    """The elements of a page: tags, attributes, and the texts of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def data(compiled):
    return describe_bundle(Bundle.open(compiled))


def test_the_page_is_one_file_that_allows_only_its_own_scripts(data):
    page = Page(render_page([data]))
    assert not any(key in ("src", "srcset", "href") and not (value or "").startswith(("#", "data:"))
                   for _, attributes in page.tags for key, value in attributes.items())  # fmt: skip
    policy = next(item["content"] for item in page.find("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    data_script, *scripts = page.scripts
    assert json.loads(data_script)[0]["title"] == "model.onnx"
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests


def test_hostile_names_stay_text(data):
    plain = Page(render_page([data]))
    timeline = replace(data.timelines[0], label=(HOSTILE,) * len(data.timelines[0].label))
    curve = replace(data.memory[0], contents=(MemoryItem(HOSTILE, HOSTILE, 1),))
    layers = replace(data.layers, label=(HOSTILE,) * len(data.layers.label))
    crossing = replace(data.crossings[0], value=HOSTILE, reason=HOSTILE)
    devices = tuple(replace(device, id=HOSTILE) for device in data.devices)
    segments = tuple(replace(segment, id=HOSTILE, title=HOSTILE) for segment in data.segments)
    verdict = replace(data.verdict, sentence=HOSTILE, limit=HOSTILE, advice=(Advice(HOSTILE, None),))
    hostile = replace(
        data, verdict=verdict, segments=segments,
        title=HOSTILE, source=HOSTILE, timelines=(timeline,), memory=(curve,), layers=layers,
        crossings=(crossing,), devices=devices, notes=(Note(*[HOSTILE] * 4),), summary=(Quantity(HOSTILE, HOSTILE),),
        passes=(Entry(HOSTILE, HOSTILE),), origin=(Entry(HOSTILE, HOSTILE),), files={HOSTILE: (1, HOSTILE)},
    )  # fmt: skip
    html = render_page([hostile, hostile])
    page = Page(html)
    assert len(page.scripts) == len(plain.scripts)
    assert not page.find("img")
    assert "alert(1)</script>" not in html
    assert "{{7*7}}" in html
    assert json.loads(page.scripts[0])[1]["title"] == HOSTILE


def test_headings_tables_and_controls_are_named(data):
    page = Page(render_page([data]))
    assert page.find("html")[0]["lang"] == "en"
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in page.tags}
    assert len(page.find("h1")) == 1
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert {item["aria-labelledby"] for item in page.find("section")} <= set(identifiers)
    assert {(item["href"] or "")[1:] for item in page.find("a")} <= set(identifiers)
    assert len(page.find("caption")) == len(page.find("table"))


def test_after_a_trial_measured_times_stand_next_to_planned_ones(compiled):
    bundle = Bundle.open(compiled)
    times = {segment.id: 1e-3 * (index + 1) for index, segment in enumerate(bundle.manifest.segments)}
    manifest = apply_trial(bundle.manifest, Trial(0.01, 0.0, times, requests=9, waiting=0.0))
    assert [item.planned_seconds for item in manifest.segments] == [item.seconds for item in bundle.manifest.segments]
    measured, planned = describe_bundle(Bundle(bundle.path, manifest)).timelines
    assert (measured.name, planned.name) == ("from trial", "from node costs")
    spans = {
        name: end - start for name, start, end in zip(measured.label, measured.start_seconds, measured.finish_seconds)
    }
    assert {name: spans[name] for name in times} == pytest.approx(times)
    assert planned.end_seconds == pytest.approx(simulate_manifest(bundle.manifest).makespan_seconds)


def test_split_operators_and_a_training_step_have_tables(compiled):
    bundle = Bundle.open(compiled)
    kind = ShardedKindRecord(op="MatMul", layout="columns", count=2, seconds=1.0)
    sharding = ShardingRecord(ways=2, stages=2, exchanges={"all-reduce": 3}, kinds=(kind,))
    manifest = bundle.manifest.model_copy(update={"sharding": sharding})
    tables = describe_bundle(Bundle(bundle.path, manifest)).division
    assert [table.caption for table in tables[:2]] == [
        "Operators split over 2 devices, in each of 2 stages", "Exchanges between the parts",
    ]  # fmt: skip
    assert tables[0].rows == (("MatMul", "columns", "2", "1000 ms"),)


def test_two_reports_stand_side_by_side(data):
    faster = replace(
        data, source="other.bundle", summary=(Quantity("Predicted step", "1 ms"), Quantity("Only here", "2"))
    )
    html = render_page([data, faster])
    assert "A: bundle" in html
    assert "B: other.bundle" in html
    assert "Only here" in html


def test_the_data_of_a_page_is_plain_json(data):
    text = json.dumps(asdict(data), allow_nan=False)
    assert json.loads(text)["devices"][0]["id"] == "cpu:0"


def test_missing_packages_are_named_with_what_to_install(data, monkeypatch):
    monkeypatch.setattr("onnxplace.reports.page_rendering.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="reports need jinja2 and bokeh, which are not installed") as error:
        render_page([data])
    assert error.value.hint == "pip install 'onnxplace[report]'"


def test_the_page_repeats_the_line_of_the_summary_and_marks_what_is_unsure(compiled):
    bundle = Bundle.open(compiled)
    assert 'class="unsure"' not in render_page([describe_bundle(bundle)])
    note = Diagnostic(code="C004", message="the trial is less sure", where=bundle.manifest.model)
    unsure = bundle.manifest.model_copy(update={"diagnostics": (note,)})
    html = render_page([describe_bundle(Bundle(bundle.path, unsure))])
    assert '<span class="unsure">unsure</span>' in html
    assert describe_step(unsure) in html
    speedup = re.search(r"([0-9.]+) times as fast", describe_step(unsure))
    assert speedup
    assert f"<b>{speedup[1]}×</b>" in html


def test_equal_devices_share_a_plot_of_memory(data):
    curve, device = data.memory[0], data.devices[0]
    devices = tuple(replace(device, id=f"gpu:{index}") for index in range(3))
    # A byte more is not seen in a plot.
    near = replace(curve, device=1, bytes=tuple(size + (size == curve.peak_bytes) for size in curve.bytes))
    shared = replace(data, devices=devices, memory=(curve, near, replace(curve, device=2)))
    assert [[item.device for item in group] for group in group_memory(shared)] == [[0, 1, 2]]
    html = render_page([shared])
    assert "Memory of gpu:0, gpu:1 and gpu:2</h3>" in html
    assert html.count('data-chart="memory"') == 1
    later = replace(curve, device=2, seconds=tuple(0.5 * time for time in curve.seconds[:-1]) + curve.seconds[-1:])
    other_kind = tuple(replace(item, kind=f"kind {index}") for index, item in enumerate(devices))
    larger = replace(curve, device=2, limit_bytes=2 * curve.limit_bytes)
    for page in (replace(shared, devices=other_kind), replace(shared, memory=(curve, larger)),
                 replace(shared, memory=(curve, later))):  # fmt: skip
        assert len(group_memory(page)) == len(page.memory)


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory):
    """The data of a bundle of an export with dynamo=True, whose operators are split over two devices."""
    folder = tmp_path_factory.mktemp("dynamo")
    onnx.save(dynamo_model(layers=3, size=20), folder / "llama.onnx")
    found = compile_model(
        folder / "llama.onnx",
        folder / "bundle",
        devices="cpu:0,cpu:1",
        shape={"batch": 1},
        shard="2",
        shard_map='{".*mlp.up": "columns", ".*mlp.down": "sum", "lm_head": "columns"}',
        effort="low",
        trial=False,
    )
    return describe_bundle(found.bundle)


def test_the_title_is_the_name_of_the_file(dynamo):
    assert dynamo.title == "llama.onnx"
    assert {entry.label: entry.text for entry in dynamo.origin}["model"] == "main_graph"


def test_an_export_with_dynamo_folds_by_its_modules(dynamo):
    tree = dynamo.layers
    assert tree.label[:3] == ("model", "layers.0 … layers.2: 3 equal layers", "layers.0")
    roots = [label for label, parent in zip(tree.label, tree.parent) if parent < 0]
    assert [label.partition("/")[0] for label in roots] == ["model", "lm_head"]
    assert {crossing.layer for crossing in dynamo.crossings} <= {f"model.layers.{n}" for n in range(3)} | {"lm_head"}


def test_values_that_cross_have_their_size(dynamo):
    """Parts of split operators have no cost of their own."""
    device = dict(zip(dynamo.layers.node, dynamo.layers.device))
    edges = dynamo.edges
    sizes = [
        size
        for source, reader, size in zip(edges.source, edges.reader, edges.bytes)
        if device[source] != device[reader]
    ]
    assert sizes
    assert min(sizes) > 0
    assert 80 in sizes
