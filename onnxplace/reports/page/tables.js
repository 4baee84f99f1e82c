// Texts, elements, and tables that grow on demand. Texts from a model only ever become text nodes.

const PAGE_ROWS = 10;
const MORE_ROWS = 200;
// Colours of devices, which repeat; page.css has them.
const COLORS = 8;

function formatSeconds(seconds) {
  if (seconds !== 0 && Math.abs(seconds) < 0.9995e-3) return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  return `${Math.abs(seconds) < 0.1 ? Number((seconds * 1e3).toPrecision(3)) : (seconds * 1e3).toFixed(0)} ms`;
}

function formatBytes(size) {
  for (const [unit, bytes] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (size >= bytes) return `${(size / bytes).toFixed(unit === "GiB" ? 2 : 1)} ${unit}`;
  }
  return `${size} B`;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// A table of `count` rows. `row(i)` returns the cells of row i; `text(i)` what the filter looks at, if there is one.
function makeTable({ caption, header, classes, count, row, text = null }) {
  // On a phone, rows become cards. Their display then hides that they are rows, so the roles say it.
  const body = make("tbody", { role: "rowgroup" });
  const head = make("tr", { role: "row" }, ...header.map((name, i) => make("th", { role: "columnheader", scope: "col", class: classes[i] }, name)));
  const table = make("table", { role: "table", class: "cards" }, make("caption", {}, caption), make("thead", { role: "rowgroup" }, head), body);
  const more = make("button", { type: "button", onclick: () => show(MORE_ROWS, true) });
  const status = make("output", { "aria-live": "polite" });
  let rows = [...Array(count).keys()];
  let shown = 0;

  function show(further, focus = false) {
    const first = shown;
    for (; shown < Math.min(first + further, rows.length); shown++) {
      const cells = row(rows[shown]);
      body.append(make("tr", { role: "row" }, ...cells.map((cell, i) => (i
        ? make("td", { role: "cell", class: classes[i], "data-label": header[i] }, cell)
        : make("th", { role: "rowheader", scope: "row", class: classes[i] }, cell)))));
    }
    more.hidden = shown >= rows.length;
    more.textContent = `Show more (${rows.length - shown} left)`;
    if (focus && body.rows[first]) {
      body.rows[first].tabIndex = -1;
      body.rows[first].focus();
    }
  }

  function filter(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    rows = [...Array(count).keys()].filter((i) => wanted.every((word) => text(i).toLowerCase().includes(word)));
    body.replaceChildren();
    shown = 0;
    show(PAGE_ROWS);
    status.textContent = wanted.length ? `${rows.length} of ${count} rows` : "";
  }

  const holder = make("div");
  if (text && count > 10) {
    const input = make("input", { type: "search", "aria-label": `Filter: ${caption}`, placeholder: "Filter", oninput: () => filter(input.value) });
    holder.append(make("div", { class: "controls" }, input, status));
  }
  holder.append(make("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 }, table), more);
  show(PAGE_ROWS);
  return holder;
}

// Values that cross, together where they come from one layer and go the same way.
function groupCrossings(items) {
  const groups = new Map();
  for (const item of items) {
    const key = JSON.stringify([item.layer, item.source, item.destinations]);
    if (!groups.has(key)) groups.set(key, { name: item.layer || "no layer", first: item, values: 0, bytes: 0, times: 0, transfer: 0, wait: 0 });
    const group = groups.get(key);
    group.values += 1;
    group.bytes += item.bytes * item.times;
    group.times += item.times;
    group.transfer += item.transfer_seconds;
    group.wait += item.wait_seconds;
  }
  return [...groups.values()].sort((a, b) => b.transfer - a.transfer);
}

function fillLayerCut(holder, report) {
  const groups = groupCrossings(report.crossings);
  holder.append(makeTable({
    caption: "What crosses between devices in a step, by layer",
    header: ["layer", "way", "values", "size", "transfers", "readers wait"],
    classes: ["", "", "number", "number", "number", "number"],
    count: groups.length,
    row: (i) => [
      groups[i].name, `${groups[i].first.source} → ${groups[i].first.destinations.join(", ")}`, String(groups[i].values),
      formatBytes(groups[i].bytes), formatSeconds(groups[i].transfer), formatSeconds(groups[i].wait),
    ],
    text: (i) => `${groups[i].name} ${groups[i].first.source} ${groups[i].first.destinations.join(" ")}`,
  }));
}

function fillCut(holder, report) {
  const items = report.crossings;
  holder.append(makeTable({
    caption: "Values that cross between devices in a step",
    header: ["value", "from", "to", "size", "times", "transfers", "gain", "why"],
    classes: ["", "short", "short", "number", "number", "number", "number", "reason"],
    count: items.length,
    row: (i) => [
      items[i].value, items[i].source, items[i].destinations.join(", "), formatBytes(items[i].bytes),
      String(items[i].times), formatSeconds(items[i].transfer_seconds),
      items[i].gain_seconds === null ? "–" : formatSeconds(items[i].gain_seconds), items[i].reason,
    ],
    text: (i) => `${items[i].value} ${items[i].source} ${items[i].destinations.join(" ")}`,
  }));
}

function fillFiles(holder, report) {
  const files = Object.entries(report.files);
  holder.append(makeTable({
    caption: "Files of the bundle",
    header: ["file", "size", "SHA-256"],
    classes: ["", "number", "digest"],
    count: files.length,
    row: (i) => [files[i][0], formatBytes(files[i][1][0]), files[i][1][1]],
  }));
}

function fillSpans(holder, report) {
  for (const timeline of report.timelines) {
    const order = [...timeline.start_seconds.keys()].sort((a, b) => timeline.start_seconds[a] - timeline.start_seconds[b]);
    const name = (i) => timeline.rows[timeline.row[order[i]]].name;
    holder.append(makeTable({
      caption: `Timeline, ${timeline.name}: ${timeline.note}`,
      header: ["what", "where", "from", "for", "more"],
      classes: ["", "short", "number", "number", ""],
      count: order.length,
      row: (i) => [
        nameSpan(report, timeline, order[i]), name(i), formatSeconds(timeline.start_seconds[order[i]]),
        formatSeconds(timeline.finish_seconds[order[i]] - timeline.start_seconds[order[i]]), timeline.detail[order[i]],
      ],
      text: (i) => `${timeline.label[order[i]]} ${nameSpan(report, timeline, order[i])} ${name(i)}`,
    }));
  }
}

function fillMemory(holder, report) {
  const curve = report.memory[Number(holder.dataset.curve)];
  holder.append(makeTable({
    caption: `Memory of ${report.devices[curve.device].id} over the step`,
    header: ["from", "memory"],
    classes: ["", "number"],
    count: curve.seconds.length,
    row: (i) => [formatSeconds(curve.seconds[i]), formatBytes(curve.bytes[i])],
  }));
}

// Fills a `details` element when it is first opened.
function fillWhenOpened(details, fill) {
  details.addEventListener("toggle", () => fill(details), { once: true });
}
