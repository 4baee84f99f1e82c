// The timeline: a row for each device and link, spans to hover, zoom by buttons, keys and Ctrl with the wheel.

const ROW_HEIGHT = 26;
// A pointer that moves further between press and release drags the timeline.
const MAX_CLICK_PIXELS = 4;
const MIN_GAP_SHARE = 0.004;

function orderRows(timelines) {
  const rows = [];
  for (const kind of ["compute", "link"]) {
    const names = [...new Set(timelines.flatMap((item) => item.rows.filter((row) => row.kind === kind).map((row) => row.name)))];
    for (const name of names) {
      timelines.forEach((timeline, source) => {
        const index = timeline.rows.findIndex((row) => row.kind === kind && row.name === name);
        if (index < 0) return;
        const isFirst = rows.length === 0 || rows[rows.length - 1].group !== `${kind} ${name}`;
        rows.push({
          group: `${kind} ${name}`, name: timelines.length > 1 ? `${name}, ${timeline.name}` : name,
          tick: isFirst ? name : timeline.name, source, index,
        });
      });
    }
  }
  return rows;
}

function collectSpans(timelines, rows, unit) {
  const position = new Map(rows.map((row, i) => [`${row.source} ${row.index}`, rows.length - 1 - i]));
  const spans = { left: [], right: [], bottom: [], top: [], label: [], where: [], from: [], length: [], detail: [] };
  const device = [];
  const source = [];
  timelines.forEach((timeline, number) => {
    timeline.row.forEach((row, i) => {
      const y = position.get(`${number} ${row}`);
      const half = timeline.rows[row].kind === "compute" ? 0.42 : 0.28;
      const [start, finish] = [timeline.start_seconds[i], timeline.finish_seconds[i]];
      spans.left.push(start * unit.factor);
      spans.right.push(finish * unit.factor);
      spans.bottom.push(y - half);
      spans.top.push(y + half);
      spans.label.push(timeline.label[i]);
      spans.where.push(rows[rows.length - 1 - y].name);
      spans.from.push(formatSeconds(start));
      spans.length.push(formatSeconds(finish - start));
      spans.detail.push(timeline.detail[i]);
      device.push(timeline.rows[row].device);
      source.push(number);
    });
  });
  return { spans, device, source };
}

async function drawTimeline(holder, report, time) {
  const unit = chooseUnit(time.end);
  const rows = orderRows(report.timelines);
  const { spans, device, source } = collectSpans(report.timelines, rows, unit);
  const figure = makeFigure({
    height: 64 + ROW_HEIGHT * rows.length, unit, end: time.end,
    yRange: new Bokeh.Range1d({ start: -0.7, end: rows.length - 0.3 }),
  });
  figure.yaxis.ticker = new Bokeh.FixedTicker({ ticks: rows.map((_, i) => i) });
  const narrow = holder.clientWidth < 600;
  const fitName = (name) => (narrow && name.length > 20 ? `${name.slice(0, 19)}…` : name);
  figure.yaxis.major_label_overrides = new Map(rows.map((row, i) => [rows.length - 1 - i, fitName(row.tick)]));
  const data = new Bokeh.ColumnDataSource({ data: { ...spans, color: [], edge: [], alpha: source.map((i) => (i ? 0.35 : 1)), edge_alpha: source.map((i) => (i ? 0.6 : 1)) } });
  const field = (name) => ({ field: name });
  const quads = figure.quad({
    left: field("left"), right: field("right"), bottom: field("bottom"), top: field("top"), source: data,
    fill_color: field("color"), fill_alpha: field("alpha"), line_color: field("edge"), line_alpha: field("edge_alpha"), line_width: 1,
  });
  figure.add_tools(new Bokeh.HoverTool({
    renderers: [quads], attachment: "vertical",
    tooltips: [["what", "@label"], ["where", "@where"], ["from", "@from"], ["for", "@length"], ["", "@detail"]],
  }));
  const mark = figure.quad({
    left: [], right: [], bottom: [], top: [], fill_alpha: 0, line_width: 3, line_color: "black",
  });
  // Spans that are wide enough have a gap to the next one; others keep their colour up to the edge, to be seen.
  const isWide = spans.left.map((left, i) => spans.top[i] - spans.bottom[i] > 0.7 && spans.right[i] - left > time.end * unit.factor * MIN_GAP_SHARE);
  const paint = () => {
    const colors = new Map([...new Set(device)].map((index) => [index, readDeviceColor(index)]));
    const color = device.map((index) => colors.get(index));
    const page = readColor("page");
    data.data = { ...data.data, color, edge: color.map((own, i) => (isWide[i] ? page : own)) };
    mark.glyph.line_color = readColor("text");
  };
  const controls = makeControls(time, spans, rows, (index) => select(index));
  const group = make("div", { role: "group", tabindex: 0, "aria-label": `Timeline of ${report.title}: ${rows.length} rows, ${spans.left.length} spans. Keys: plus and minus zoom, arrows move, 0 shows all, n and p select spans.` });
  holder.append(controls.element, group, controls.status);
  let selected = -1;

  function select(index) {
    selected = index;
    const [start, finish] = [spans.left[index], spans.right[index]].map((value) => value / unit.factor);
    if (start < time.start_seconds || finish > time.finish_seconds) {
      const width = Math.max(time.finish_seconds - time.start_seconds, (finish - start) * 1.5);
      time.set((start + finish - width) / 2, (start + finish + width) / 2);
    }
    mark.data_source.data = Object.fromEntries(["left", "right", "bottom", "top"].map((side) => [side, [spans[side][index]]]));
    controls.describe(index);
  }

  const plot = await showFigure(figure, group, paint);
  time.bind(figure, unit);
  addKeys(group, time, (step) => select(controls.step(selected, step)));
  addWheel(plot, figure, time, unit);
  addTaps(plot, figure, spans, select);
  requestAnimationFrame(() => {
    performance.mark("timeline drawn");
    holder.dataset.ready = "true";
  });
}

function makeControls(time, spans, rows, select) {
  const status = make("output", { "aria-live": "polite" });
  const order = [...spans.left.keys()].sort((a, b) => spans.left[a] - spans.left[b] || spans.top[b] - spans.top[a]);
  const place = new Map(order.map((index, i) => [index, i]));
  const showRange = () => {
    status.className = "";
    status.textContent = `Shown: ${formatSeconds(time.start_seconds)} to ${formatSeconds(time.finish_seconds)}`;
  };
  let current = -1;
  const step = (from, by) => order[(((from < 0 && by < 0 ? 0 : from < 0 ? -1 : place.get(from)) + by) + order.length) % order.length];
  const button = (text, label, act) => make("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const go = (by) => {
    current = step(current, by);
    select(current);
  };
  const element = make(
    "div", { class: "controls", role: "toolbar", "aria-label": "Zoom and move" },
    button("+", "Zoom in", () => time.zoom(0.5)), button("−", "Zoom out", () => time.zoom(2)),
    button("◀", "Earlier", () => time.move(-0.5)), button("▶", "Later", () => time.move(0.5)),
    button("All", "Show the whole step", () => time.set(0, time.end)),
    button("Previous span", "Select the previous span", () => go(-1)), button("Next span", "Select the next span", () => go(1)),
  );
  time.listeners.add(showRange);
  showRange();
  const describe = (index) => {
    current = index;
    status.className = "selected";
    const detail = spans.detail[index] ? `, ${spans.detail[index]}` : "";
    status.textContent = `${spans.label[index]} on ${spans.where[index]}: from ${spans.from[index]} for ${spans.length[index]}${detail}`;
  };
  return { element, status, describe, step };
}

function addKeys(group, time, step) {
  const keys = {
    "+": () => time.zoom(0.5), "=": () => time.zoom(0.5), "-": () => time.zoom(2), 0: () => time.set(0, time.end),
    ArrowLeft: () => time.move(-0.25), ArrowRight: () => time.move(0.25), n: () => step(1), p: () => step(-1),
  };
  group.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// The part of the frame at a horizontal position of the pointer, and its value in units of the axis.
function locate(plot, figure, event) {
  const view = Bokeh.index.find_one(figure);
  const box = plot.getBoundingClientRect();
  const frame = view.frame.bbox;
  return {
    x: figure.x_range.start + ((event.clientX - box.left - frame.left) / frame.width) * (figure.x_range.end - figure.x_range.start),
    y: figure.y_range.start + ((frame.bottom - (event.clientY - box.top)) / frame.height) * (figure.y_range.end - figure.y_range.start),
  };
}

function addWheel(plot, figure, time, unit) {
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    time.zoom(event.deltaY > 0 ? 1.25 : 0.8, locate(plot, figure, event).x / unit.factor);
  }, { passive: false, capture: true });
}

function addTaps(plot, figure, spans, select) {
  let pressed = null;
  plot.addEventListener("pointerdown", (event) => { pressed = event; }, { capture: true });
  plot.addEventListener("click", (event) => {
    if (pressed && Math.hypot(event.clientX - pressed.clientX, event.clientY - pressed.clientY) > MAX_CLICK_PIXELS) return;
    const { x, y } = locate(plot, figure, event);
    const index = spans.left.findIndex((left, i) => left <= x && x <= spans.right[i] && spans.bottom[i] <= y && y <= spans.top[i]);
    if (index >= 0) select(index);
  });
}
