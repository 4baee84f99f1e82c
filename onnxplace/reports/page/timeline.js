// The timeline: a row for each device and link, spans to hover, zoom by buttons, keys and Ctrl with the wheel.

const ROW_HEIGHT = 26;
// A pointer that moves further between press and release drags the timeline.
const MAX_CLICK_PIXELS = 4;
const MIN_GAP_SHARE = 0.004;
// Names are written on spans that are wider than this.
const MIN_NAMED_PIXELS = 34;
const NAME_PIXELS_PER_LETTER = 6;
// With more transfers, arrows are drawn for the selected one only.
const MAX_ARROWS = 80;

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
          tick: isFirst ? name : timeline.name.replace(/^from /, ""), source, index,
        });
      });
    }
  }
  return rows;
}

function collectSpans(report, rows, unit) {
  const timelines = report.timelines;
  const position = new Map(rows.map((row, i) => [`${row.source} ${row.index}`, rows.length - 1 - i]));
  const spans = { left: [], right: [], bottom: [], top: [], label: [], where: [], from: [], length: [], detail: [], isFaint: [] };
  const device = [];
  const source = [];
  const first = [];
  timelines.forEach((timeline, number) => {
    first.push(device.length);
    timeline.row.forEach((row, i) => {
      const y = position.get(`${number} ${row}`);
      const half = timeline.rows[row].kind === "compute" ? 0.42 : 0.28;
      const [start, finish] = [timeline.start_seconds[i], timeline.finish_seconds[i]];
      spans.left.push(start * unit.factor);
      spans.right.push(finish * unit.factor);
      spans.bottom.push(y - half);
      spans.top.push(y + half);
      spans.label.push(nameSpan(report, timeline, i));
      spans.where.push(rows[rows.length - 1 - y].name);
      spans.from.push(formatSeconds(start));
      spans.length.push(formatSeconds(finish - start));
      spans.detail.push(findSegment(report, timeline, i) >= 0 ? `${timeline.label[i]}, ${timeline.detail[i]}` : timeline.detail[i]);
      spans.isFaint.push(number > 0);
      device.push(timeline.rows[row].device);
      source.push(number);
    });
  });
  return { spans, device, source, first };
}

async function drawTimeline(holder, report, time) {
  const unit = chooseUnit(time.end);
  const rows = orderRows(report.timelines);
  const { spans, device, source, first } = collectSpans(report, rows, unit);
  const figure = makeFigure(holder, {
    height: 96 + ROW_HEIGHT * rows.length, unit, end: time.end,
    yRange: new Bokeh.Range1d({ start: -0.7, end: rows.length + 0.9 }),
  });
  figure.yaxis.ticker = new Bokeh.FixedTicker({ ticks: rows.map((_, i) => i) });
  figure.yaxis.major_label_overrides = new Map(rows.map((row, i) => [rows.length - 1 - i, fitName(holder, row.tick)]));
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
  const names = addNames(holder, figure, spans, time, unit, rows.length);
  const arrows = addArrows(figure, report, spans, first);
  const limits = addLimits(figure, report, unit, rows.length);
  // Spans that are wide enough have a gap to the next one; others keep their colour up to the edge, to be seen.
  const isWide = spans.left.map((left, i) => spans.top[i] - spans.bottom[i] > 0.7 && spans.right[i] - left > time.end * unit.factor * MIN_GAP_SHARE);
  const paint = () => {
    const colors = new Map([...new Set(device)].map((index) => [index, readDeviceColor(index)]));
    const color = device.map((index) => colors.get(index));
    const page = readColor("page");
    data.data = { ...data.data, color, edge: color.map((own, i) => (isWide[i] ? page : own)) };
    mark.glyph.line_color = readColor("text");
    names.paint(colors, device);
    arrows.paint();
    limits.paint();
  };
  const controls = makeControls(time, spans, rows, (index) => select(index));
  const group = make("div", { role: "group", tabindex: 0, "aria-label": `Timeline of ${report.title}: ${rows.length} rows, ${spans.left.length} spans. Keys: plus and minus zoom, arrows move, 0 shows all, n and p select spans.` });
  const panel = make("div", { class: "panel" });
  holder.append(controls.element, group, controls.status, panel);
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
    arrows.select(index);
    showSpan(panel, report, report.timelines[source[index]], index - first[source[index]]);
  }

  const plot = await showFigure(figure, group, paint);
  time.bind(figure, unit);
  names.update();
  addKeys(group, time, (step) => select(controls.step(selected, step)));
  addWheel(plot, figure, time, unit);
  addTaps(plot, figure, spans, select);
  requestAnimationFrame(() => {
    performance.mark("timeline drawn");
    holder.dataset.ready = "true";
  });
}

// Names on the spans that have room for them, in black or white, whichever stands out.
function addNames(holder, figure, spans, time, unit, rows) {
  const texts = figure.text({
    x: [], y: [], text: [], text_color: [], x_offset: 4, text_font_size: "11px", text_baseline: "middle", text_align: "left",
  });
  let colors = [];
  function update() {
    const [start, finish] = [time.start_seconds * unit.factor, time.finish_seconds * unit.factor];
    const pixels = (holder.clientWidth - findLeft(holder) - 16) / (finish - start);
    const data = { x: [], y: [], text: [], text_color: [] };
    for (let i = 0; i < spans.left.length; i++) {
      const left = Math.max(spans.left[i], start);
      const width = (Math.min(spans.right[i], finish) - left) * pixels;
      if (width < MIN_NAMED_PIXELS || spans.top[i] - spans.bottom[i] < 0.7) continue;
      const letters = Math.floor((width - 8) / NAME_PIXELS_PER_LETTER);
      data.x.push(left);
      data.y.push((spans.top[i] + spans.bottom[i]) / 2);
      data.text.push(spans.label[i].length > letters ? `${spans.label[i].slice(0, letters - 1)}…` : spans.label[i]);
      data.text_color.push(colors[i]);
    }
    texts.data_source.data = data;
  }
  time.listeners.add(update);
  return {
    update,
    paint(palette, device) {
      const inks = new Map([...palette].map(([index, color]) => [index, chooseInk(color)]));
      const page = chooseInk(readColor("page"));
      colors = device.map((index, i) => (spans.isFaint[i] ? page : inks.get(index)));
      update();
    },
  };
}

function chooseInk(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(color.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000" : "#ffffff";
}

// Arrows from transfers to the spans that read them: all of them if they are few, and thicker that of the selected one.
function addArrows(figure, report, spans, first) {
  const pairs = report.timelines.flatMap((timeline, number) => timeline.reader.flatMap((reader, i) => (
    reader < 0 ? [] : [[first[number] + i, first[number] + reader]])));
  const makeLayer = (width) => {
    const data = { x0: [], y0: [], x1: [], y1: [], angle: [] };
    const source = new Bokeh.ColumnDataSource({ data });
    const field = (name) => ({ field: name });
    const lines = figure.segment({ x0: field("x0"), y0: field("y0"), x1: field("x1"), y1: field("y1"), source, line_width: width });
    const tips = figure.scatter({ x: field("x1"), y: field("y1"), angle: field("angle"), marker: "triangle", size: 3 + 2 * width, source });
    return { source, lines, tips };
  };
  const [all, chosen] = [makeLayer(1), makeLayer(2.5)];
  const show = (layer, shown) => {
    const data = { x0: [], y0: [], x1: [], y1: [], angle: [] };
    for (const [from, to] of shown) {
      const rises = spans.bottom[to] > spans.top[from];
      data.x0.push(spans.right[from]);
      data.y0.push(rises ? spans.top[from] : spans.bottom[from]);
      data.x1.push(spans.left[to]);
      data.y1.push(rises ? spans.bottom[to] : spans.top[to]);
      data.angle.push(rises ? 0 : Math.PI);
    }
    layer.source.data = data;
  };
  if (pairs.length <= MAX_ARROWS) show(all, pairs);
  return {
    select: (index) => show(chosen, pairs.filter((pair) => pair.includes(index))),
    paint() {
      for (const [layer, color] of [[all, readColor("quiet")], [chosen, readColor("text")]]) {
        layer.lines.glyph.line_color = color;
        layer.tips.glyph.setv({ fill_color: color, line_color: color });
      }
    },
  };
}

// Lines at the lower bound, and at the best single device where that is in the picture.
function addLimits(figure, report, unit, rows) {
  const { lower_bound_seconds: lowest, single_device_seconds: single } = report.bound;
  const lines = [[lowest, "lower bound", -0.15], [single, "one device", 0.4]]
    .filter(([seconds]) => seconds > 0 && seconds * unit.factor <= figure.x_range.end)
    .map(([seconds, text, above]) => {
      const line = new Bokeh.Span({ location: seconds * unit.factor, dimension: "height", line_dash: [6, 4], line_width: 1.5 });
      const label = new Bokeh.Label({ x: seconds * unit.factor, y: rows + above, text, text_align: "right", x_offset: -4, text_font_size: "11px", text_baseline: "middle" });
      figure.add_layout(line);
      figure.add_layout(label);
      return { line, label };
    });
  return {
    paint() {
      for (const { line, label } of lines) {
        line.line_color = readColor("limit");
        label.text_color = readColor("text");
      }
    },
  };
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
    button("Whole step", "Show the whole step", () => time.set(0, time.end)),
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
