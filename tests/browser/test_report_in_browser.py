"""Reports in Chromium: no errors, no requests, zoom, hover, keys, light and dark, desktop and phone."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.driver.compile import compile_model
from onnxplace.driver.place import place_cost_graph, replace_devices
from onnxplace.reports.layer_tree import LayerNode, build_layer_tree
from onnxplace.reports.page_data import PlacedGraph, describe_bundle, describe_placement
from onnxplace.reports.page_records import NodeEdges, PageData
from onnxplace.reports.page_rendering import render_page
from tests.browser.chromium import Browser, open_browser
from tests.report.test_page import HOSTILE
from tests.support.dynamo_models import dynamo_model

# Pictures and the opening times, for people to look at.
ARTEFACTS = Path(__file__).parents[2] / "build" / "report"
MAX_PAGE_BYTES = 15_000_000
PHONE, DESKTOP = (375, 812), (1280, 900)
# Screens of a phone before the first fold.
MAX_SCREENS = 5
# From the top of a timeline to its first row.
FIRST_ROW_PIXELS = 46


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


def place(nodes: int, devices: int, kind: str = "two_tower") -> PageData:
    graph = replace_devices(GENERATORS[kind](nodes, seed=0), devices, None)
    result = place_cost_graph(graph, "m-etf")
    return describe_placement(
        PlacedGraph(graph, result.placer, result.device, result.schedule, result.feasible, result.seconds)
    )


@pytest.fixture(scope="module")
def two_tower(tmp_path_factory) -> Path:
    """A bundle of the README's model, with attempts and a trial."""
    import models

    folder = tmp_path_factory.mktemp("two-tower")
    models.save(models.build("two-tower"), folder / "two-tower.onnx")
    shape = {"images": 4, "texts": 8}
    model, bundle = folder / "two-tower.onnx", folder / "two-tower.bundle"
    compile_model(model, bundle, devices="cpu:0,cpu:1", shape=shape, shard="off", budget_seconds=1.0)
    return bundle


@pytest.fixture(scope="module")
def page(tmp_path_factory, two_tower) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_page([describe_bundle(Bundle.open(two_tower))]), encoding="utf-8")
    return path


def find(browser: Browser, selector: str):
    return browser.driver.find_element(By.CSS_SELECTOR, selector)


def read_status(browser: Browser) -> str:
    return find(browser, "[data-chart=timeline] output").text


def read_picture(browser: Browser) -> str:
    """Return the pixels of the timeline, which change where it changes."""
    browser.settle()
    return str(find(browser, "[data-chart=timeline] .plot").screenshot_as_base64)


def find_tooltips(browser: Browser) -> list[str]:
    """Return the texts of visible tooltips, which are inside shadow roots."""
    script = """
    const texts = [];
    const visit = (root) => root.querySelectorAll('*').forEach((element) => {
      if (element.classList.contains('bk-tooltip-content') && element.offsetParent !== null) {
        texts.push(element.textContent);
      }
      if (element.shadowRoot) visit(element.shadowRoot);
    });
    visit(document);
    return texts;
    """
    return [str(text) for text in browser.run(script)]


def press(browser: Browser, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_loads_nothing_and_reports_no_problem(browser, page, size, dark):
    browser.open(page, *size, dark=dark)
    name = f"{'phone' if size == PHONE else 'desktop'}-{'dark' if dark else 'light'}.png"
    browser.capture(ARTEFACTS / name)
    assert browser.list_console_problems() == []
    assert [address for address in browser.list_requests() if not address.startswith("data:")] == [page.as_uri()]
    width = browser.run("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1]
    folds = browser.run("return document.querySelector('.fold').getBoundingClientRect().top + scrollY")
    assert folds <= MAX_SCREENS * size[1]


def test_pictures_for_the_readme_show_verdict_and_timeline(browser, page):
    browser.open(page, 1000, 900)
    browser.capture(ARTEFACTS / "readme-desktop.png", 960, begin="[aria-labelledby=summary-0]")
    browser.open(page, *PHONE, dark=True)
    browser.capture(ARTEFACTS / "readme-phone.png", 780, begin="[aria-labelledby=timeline-0]", scale=0.5)
    assert find(browser, "[data-chart=timeline] .plot").is_displayed()


def test_the_picture_of_the_first_example_shows_both_devices_at_work(browser, tmp_path):
    import models

    models.save(models.build("two-encoders"), tmp_path / "two-encoders.onnx")
    bundle = onnxplace.compile(tmp_path / "two-encoders.onnx", devices="cpu:0,cpu:1", trial=False, budget_seconds=1.0)
    onnxplace.report(bundle, output=tmp_path / "page.html")
    browser.open(tmp_path / "page.html", 1000, 900)
    browser.capture(ARTEFACTS / "two-encoders.png", 340, begin="[aria-labelledby=timeline-0]")
    assert all(device.nodes for device in bundle.manifest.devices)


def test_a_notebook_frame_shows_the_report_without_access_to_the_notebook(browser, two_tower, tmp_path):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>notebook</title>{onnxplace.load(two_tower)._repr_html_()}")
    browser.driver.get(notebook.as_uri())
    browser.driver.switch_to.frame(0)
    browser.run("document.querySelector('[data-chart=timeline]').scrollIntoView()")  # it is drawn when it is near
    browser.wait(lambda: find(browser, "[data-chart=timeline]").get_attribute("data-ready") == "true")
    browser.driver.switch_to.default_content()
    assert browser.list_console_problems() == []
    assert browser.run("return document.querySelector('iframe').contentDocument") is None


def test_zoom_changes_the_timeline_by_buttons_keys_and_wheel(browser, page):
    browser.open(page)
    group = find(browser, "[data-chart=timeline] [role=group]")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", group)
    whole, first = read_status(browser), read_picture(browser)

    def zoom_by_wheel() -> None:
        driver = browser.driver
        origin = ScrollOrigin.from_element(group)
        ActionChains(driver).key_down(Keys.CONTROL).scroll_from_origin(origin, 0, -300).key_up(Keys.CONTROL).perform()

    ways = [
        lambda: find(browser, "button[aria-label='Zoom in']").click(),
        lambda: (browser.run("arguments[0].focus()", group), press(browser, "+")),
        zoom_by_wheel,
    ]
    for zoom in ways:
        zoom()
        browser.wait(lambda: read_status(browser) != whole and read_picture(browser) != first)
        find(browser, "button[aria-label='Show the whole step']").click()
        browser.wait(lambda: read_status(browser) == whole)
    assert browser.list_console_problems() == []


def test_dragging_moves_the_zoomed_timeline(browser, page):
    browser.open(page)
    find(browser, "button[aria-label='Zoom in']").click()
    before = read_status(browser)
    plot = find(browser, "[data-chart=timeline] .plot")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)

    def drag() -> bool:
        actions = ActionChains(browser.driver).click_and_hold(plot)
        for _ in range(4):
            actions = actions.move_by_offset(-30, 0).pause(0.02)
        actions.release().perform()
        browser.settle()
        return read_status(browser) != before and read_status(browser).startswith("Shown: ")

    browser.wait(drag)  # a busy machine may take the first gesture for a click


def test_hovering_a_span_says_what_it_is(browser, page):
    browser.open(page)
    plot = find(browser, "[data-chart=timeline] .plot")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    before = read_picture(browser)
    # The first row is that of a device, busy at some place within these.
    shares = itertools.cycle((0.1, 0.0, 0.2, -0.1, -0.2, 0.3))

    def hover() -> bool:
        offset = (int(next(shares) * plot.size["width"]), FIRST_ROW_PIXELS - plot.size["height"] // 2)
        ActionChains(browser.driver).move_to_element_with_offset(plot, *offset).perform()
        browser.settle()
        return any("cpu" in text and "ms" in text for text in find_tooltips(browser))

    browser.wait(hover)
    browser.wait(lambda: read_picture(browser) != before)


def test_the_keyboard_reaches_and_selects_spans(browser, page):
    browser.open(page)
    reached = []
    for _ in range(40):
        press(browser, Keys.TAB)
        reached.append(browser.run("return document.activeElement.getAttribute('role')"))
        if reached[-1] == "group":
            break
    assert reached[-1] == "group", reached
    press(browser, "n")
    first = read_status(browser)
    assert " on cpu:" in first
    assert ": from " in first
    press(browser, "n")
    assert read_status(browser) != first
    press(browser, "p")
    assert read_status(browser) == first
    press(browser, "+", Keys.ARROW_RIGHT)
    browser.wait(lambda: read_status(browser).startswith("Shown: "))
    press(browser, "0")
    browser.wait(lambda: read_status(browser).startswith("Shown: 0 ms"))


def test_dark_is_dark(browser, page):
    def read_ground() -> str:
        return str(browser.run("return getComputedStyle(document.documentElement).backgroundColor"))

    browser.open(page)
    ground, picture = read_ground(), read_picture(browser)
    browser.set_scheme(dark=True)
    browser.wait(lambda: read_ground() != ground and read_picture(browser) != picture)


def click(browser: Browser, selector: str, text: str = "") -> None:
    """Click the first element of a selector that has a text."""
    script = (
        "const found = [...document.querySelectorAll(arguments[0])].find((e) => e.textContent.includes(arguments[1]));"
        "found.dispatchEvent(new MouseEvent('click', {bubbles: true})); return found.textContent"
    )
    browser.run(script, selector, text)


def test_the_theme_switch_wins_over_the_system(browser, page):
    def read_ground() -> str:
        return str(browser.run("return getComputedStyle(document.documentElement).backgroundColor"))

    browser.open(page)
    light, picture = read_ground(), read_picture(browser)
    click(browser, "[data-theme]")
    assert (find(browser, "[data-theme]").text, read_ground()) == ("Theme: light", light)
    click(browser, "[data-theme]")
    assert find(browser, "[data-theme]").text == "Theme: dark"
    assert read_ground() != light
    browser.wait(lambda: read_picture(browser) != picture)
    click(browser, "[data-theme]")
    assert (find(browser, "[data-theme]").text, read_ground()) == ("Theme: system", light)


def test_a_selected_span_has_details_with_nodes_shapes_and_costs(browser, page):
    browser.open(page)
    click(browser, "button", "Next span")
    text = browser.run("return document.querySelector('[data-chart=timeline] .panel').innerText")
    for part in ("segment", "from node costs", "node", "operator", "shape", "source of the cost", "Conv", "measured"):
        assert part in text, (part, text)


def test_the_graph_opens_finds_and_shows_the_cut(browser, tmp_path):
    import models

    models.save(models.build("two-tower"), tmp_path / "two-tower.onnx")
    # Without a trial, which keeps one device where the machine is busy.
    bundle = onnxplace.compile(
        tmp_path / "two-tower.onnx", devices="cpu:0,cpu:1", shape={"images": 4, "texts": 8}, placer="m-etf",
        shard="off", effort="low", trial=False,
    )  # fmt: skip
    onnxplace.report(bundle, output=tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run("document.querySelector('[data-graph]').scrollIntoView()")
    count = "return document.querySelectorAll('[data-graph] .box').length"
    browser.wait(lambda: browser.run(count) > 0)
    first = browser.run(count)
    status = "return document.querySelector('[data-graph] output').textContent"
    assert "values cross inside boxes" in browser.run(status)
    click(browser, "[data-graph] button", "Open the cut")
    assert browser.run(count) > first
    assert "inside boxes" not in browser.run(status)
    assert browser.run("return document.querySelectorAll('[data-graph] .size').length") > 0
    browser.capture(ARTEFACTS / "graph-desktop.png", 760, begin="[data-graph]")
    field = find(browser, "[data-graph] input")
    field.send_keys("text/block_2 softmax")
    click(browser, "[data-graph] .found button")
    text = browser.run("return document.querySelector('[data-graph] .panel').innerText")
    assert text.startswith("text/block_2/attention/softmax")
    assert "Softmax" in text
    marked = browser.run("return document.activeElement.classList.contains('marked')")
    assert marked
    click(browser, "[data-graph] button", "Collapse")
    assert browser.run(count) == first
    assert browser.list_console_problems() == []


# Lists what is wrong with the picture of the graph: edges that do not run down, texts outside of boxes, parts cut off.
CHECK_PICTURE = """
const frame = document.querySelector('.graph');
const picture = frame.querySelector('svg');
const wrong = [];
const isInside = (inner, outer) => inner.left >= outer.left - 0.5 && inner.right <= outer.right + 0.5
  && inner.top >= outer.top - 0.5 && inner.bottom <= outer.bottom + 0.5;
for (const box of frame.querySelectorAll('.box, .cluster')) {
  for (const text of box.querySelectorAll('text')) {
    if (!isInside(text.getBoundingClientRect(), box.querySelector('rect').getBoundingClientRect())) {
      wrong.push(`outside of its box: ${text.textContent}`);
    }
  }
}
for (const part of picture.querySelectorAll('rect, path, text')) {
  if (!isInside(part.getBoundingClientRect(), picture.getBoundingClientRect())) wrong.push(`cut: ${part.outerHTML}`);
}
for (const path of picture.querySelectorAll('.edge path:first-child')) {
  const heights = path.getAttribute('d').split(/[ML]/).slice(1).map((point) => Number(point.split(' ')[1]));
  if (heights.some((height, i) => height < heights[i - 1])) wrong.push(`runs back: ${path.getAttribute('d')}`);
}
if (frame.scrollWidth > frame.clientWidth) wrong.push(`wider than its frame: ${frame.scrollWidth}`);
return wrong;
"""


def open_graph(browser: Browser, path: Path, size: tuple[int, int]) -> None:
    browser.open(path, *size)
    browser.run("document.querySelector('[data-graph]').scrollIntoView()")
    browser.wait(lambda: browser.run("return document.querySelectorAll('[data-graph] .box').length"))


@pytest.fixture(scope="module")
def dynamo_page(tmp_path_factory) -> Path:
    """A page about an export with dynamo=True, with split operators."""
    folder = tmp_path_factory.mktemp("dynamo")
    onnx.save(dynamo_model(layers=12, size=32), folder / "llama.onnx")
    compile_model(
        folder / "llama.onnx", folder / "bundle", devices="cpu:0,cpu:1", shape={"batch": 8}, effort="low", trial=False,
        shard="2", shard_map='{".*mlp.up": "columns", ".*mlp.down": "sum", "lm_head": "columns"}',
    )  # fmt: skip
    onnxplace.report(folder / "bundle", output=folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_graph_of_a_dynamo_export_folds_and_fits_its_frame(browser, dynamo_page, size):
    open_graph(browser, dynamo_page, size)
    assert find(browser, "h1").text == "llama.onnx"
    first = "[...document.querySelectorAll('.graph .box text:first-of-type')]"
    titles = browser.run(f"return {first}.map((e) => e.textContent)")
    assert "+ layers.0 … layers.11" in titles
    name = "phone" if size == PHONE else "desktop"
    browser.capture(ARTEFACTS / f"dynamo-{name}.png", 700, begin="[data-graph]")
    assert browser.run(CHECK_PICTURE) == []
    click(browser, "[data-graph] button", "Open the cut")
    # Too many boxes for lines around them: they are in rows.
    assert browser.run("return document.querySelectorAll('.graph .box').length") > 60
    sizes = browser.run("return [...document.querySelectorAll('.graph .size')].map((e) => e.textContent)")
    assert sizes
    assert "0 B" not in sizes
    browser.capture(ARTEFACTS / f"dynamo-cut-{name}.png", 700, begin="[data-graph]")
    assert browser.run(CHECK_PICTURE) == []
    assert browser.list_console_problems() == []


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@example(seed=149, nodes=8, depth=2, width=3)  # a line around the boxes, beyond the left edge
@given(seed=st.integers(0, 10_000), nodes=st.integers(2, 150), depth=st.integers(1, 4), width=st.integers(2, 12))
def test_pictures_of_random_graphs_fit_their_frame(browser, base, tmp_path_factory, seed, nodes, depth, width):
    random = np.random.default_rng(seed)
    names = [".".join(f"{'layer_' * 4}{part}" for part in random.integers(0, width, depth)) for _ in range(nodes)]
    layers = [
        LayerNode(f"{name}.node_{index}", "LayerNormalization", index % 2, 0.0, index)
        for index, name in enumerate(names)
    ]
    pairs = random.integers(0, nodes, (3 * nodes, 2)).tolist()
    edges = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    sizes = [80] * len(edges)
    sources, readers = zip(*edges) if edges else ((), ())
    page = replace(base, layers=build_layer_tree(layers, edges), edges=NodeEdges(sources, readers, tuple(sizes)))
    path = tmp_path_factory.mktemp("random") / "page.html"
    path.write_text(render_page([page]), encoding="utf-8")
    for size in (DESKTOP, PHONE):
        open_graph(browser, path, size)
        assert browser.run(CHECK_PICTURE) == []
        click(browser, "[data-graph] button", "Open the cut")
        assert browser.run(CHECK_PICTURE) == []


@pytest.fixture(scope="module")
def base() -> PageData:
    return place(20, 2)


def test_a_click_sends_the_trace_to_perfetto_and_saves_it_without_an_answer(browser, page):
    browser.open(page)
    # A window of this page plays the viewer, which no test may reach.
    browser.run("""
      window.sent = []; window.saved = '';
      const viewer = document.body.appendChild(document.createElement('iframe')).contentWindow;
      viewer.postMessage = (message, origin) => {
        window.sent.push([message, origin]);
        if (window.answers && message === 'PING') {
          window.dispatchEvent(new MessageEvent('message', {data: 'PONG', source: viewer}));
        }
      };
      window.open = (address) => { window.opened = address; return viewer; };
      HTMLAnchorElement.prototype.click = function () { window.saved = this.download; };
      const now = Date.now; window.later = 0; Date.now = () => now() + window.later;
    """)
    assert browser.run("return window.opened") is None
    click(browser, "[data-perfetto]")
    browser.wait(lambda: browser.run("return window.sent.length"))
    assert browser.run("return window.sent[0]") == ["PING", "https://ui.perfetto.dev"]
    browser.run("window.later = 60000")
    browser.wait(lambda: browser.run("return window.saved"))
    assert browser.run("return window.saved").endswith(".trace.json")
    browser.run("window.answers = true; window.sent = []")
    click(browser, "[data-perfetto]")
    browser.wait(lambda: browser.run("return window.sent.some(([message]) => message.perfetto)"))
    trace = json.loads(
        browser.run(
            "const [{perfetto}] = window.sent.map(([message]) => message).filter((m) => m.perfetto);"
            "return new TextDecoder().decode(perfetto.buffer)"
        )
    )
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"from trial", "from node costs"}
    assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")


def test_a_link_opens_the_section_that_it_leads_to(browser, page):
    browser.open(page)
    state = "return document.getElementById('notes-0').closest('details').open"
    assert browser.run(state) is False
    browser.run("document.querySelector('a[href=\"#notes-0\"]').click()")
    browser.wait(lambda: browser.run(state))


def test_tables_grow_filter_and_layers_open(browser, page):
    browser.open(page)
    rows = "return document.querySelectorAll('[data-table=cut] tbody tr').length"
    click(browser, "[data-table=cut] > summary")
    browser.wait(lambda: browser.run(rows) > 0)
    field = find(browser, "[data-table=cut] input")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", field)
    field.send_keys("no such value")
    browser.wait(lambda: browser.run(rows) == 0)
    browser.run("document.getElementById('layers-0').closest('details').open = true")
    summary = find(browser, "[data-layers] details:not([open]) > summary")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", summary)
    inside = "return document.querySelectorAll('[data-layers] details, [data-layers] li').length"
    before = browser.run(inside)
    summary.click()
    browser.wait(lambda: browser.run(inside) > before)
    table = find(browser, "[data-table=timeline] > summary")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", table)
    table.click()
    browser.wait(lambda: browser.run("return document.querySelectorAll('[data-table=timeline] tbody tr').length") > 0)


def test_every_control_has_a_name_and_every_table_a_caption(browser, page):
    browser.open(page)
    unnamed = browser.run(
        "return [...document.querySelectorAll('button:not([hidden]), input, [tabindex=\"0\"], [role=img]')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert unnamed == []
    assert browser.run("return [...document.querySelectorAll('table')].every((t) => t.caption?.textContent)")
    levels = browser.run("return [...document.querySelectorAll('h1,h2,h3,h4')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_hostile_names_run_nothing(browser, tmp_path):
    data = place(60, 2)
    timeline = replace(data.timelines[0], label=(HOSTILE,) * len(data.timelines[0].label))
    timeline = replace(timeline, rows=tuple(replace(row, name=f"{row.name}{HOSTILE}") for row in timeline.rows))
    crossings = tuple(replace(item, value=HOSTILE, reason=HOSTILE) for item in data.crossings)
    layers = replace(data.layers, label=(HOSTILE,) * len(data.layers.label))
    devices = tuple(replace(device, id=f"{device.id}{HOSTILE}") for device in data.devices)
    hostile = replace(
        data, title=HOSTILE, source=HOSTILE, timelines=(timeline,), crossings=crossings, layers=layers, devices=devices
    )
    path = tmp_path / "hostile.html"
    path.write_text(render_page([hostile]), encoding="utf-8")
    browser.open(path)
    plot = find(browser, "[data-chart=timeline] .plot")
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    for share in (0.1, 0.0, 0.2, -0.1):
        offset = (int(share * plot.size["width"]), FIRST_ROW_PIXELS - plot.size["height"] // 2)
        ActionChains(browser.driver).move_to_element_with_offset(plot, *offset).perform()
        browser.settle()
    press(browser, Keys.TAB)
    images = "let n = 0; const visit = (r) => r.querySelectorAll('*').forEach((e) => { if (e.tagName === 'IMG') n++; "
    assert browser.run(images + "if (e.shadowRoot) visit(e.shadowRoot); }); visit(document); return n") == 0
    assert browser.list_console_problems() == []
    assert [address for address in browser.list_requests() if not address.startswith("data:")] == [path.as_uri()]


def test_two_reports_are_side_by_side_on_a_desktop(browser, tmp_path):
    path = tmp_path / "two.html"
    path.write_text(render_page([place(200, 2), place(200, 4)]), encoding="utf-8")
    browser.open(path)
    browser.capture(ARTEFACTS / "two-desktop.png")
    left, right = browser.run(
        "return [...document.querySelectorAll('article')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    assert left["right"] <= right["left"]
    assert left["top"] == right["top"]
    assert browser.list_console_problems() == []


def test_twenty_thousand_nodes_open(browser, tmp_path):
    path = tmp_path / "large.html"
    path.write_text(render_page([place(20_000, 4, "tf_like")]), encoding="utf-8")
    assert path.stat().st_size < MAX_PAGE_BYTES
    seconds = []
    for _ in range(3):
        browser.driver.get("about:blank")
        browser.open(path)
        seconds.append(browser.run("return performance.getEntriesByType('mark').at(-1).startTime / 1e3"))
    browser.capture(ARTEFACTS / "large-desktop.png")
    assert browser.list_console_problems() == []
    figures = {"page_bytes": path.stat().st_size, "seconds_until_the_timeline_is_drawn": seconds}
    (ARTEFACTS / "opening.json").write_text(json.dumps(figures), encoding="utf-8")
