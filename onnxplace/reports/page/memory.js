// Memory over a step: an area for each device, its peak, and its limit where that is near.

// A limit above this multiple of the peak would flatten the curve: it is then drawn at the top, and says so.
const MAX_LIMIT_RATIO = 3;

async function drawMemory(holder, report, curve, time) {
  const unit = chooseUnit(time.end);
  const isFar = curve.limit_bytes > MAX_LIMIT_RATIO * curve.peak_bytes;
  const top = isFar ? 1.3 * curve.peak_bytes : Math.max(curve.limit_bytes, curve.peak_bytes);
  const [size, name] = top >= 2 ** 30 ? [2 ** 30, "GiB"] : top >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  const figure = makeFigure(holder, {
    height: holder.clientWidth < NARROW_PIXELS ? 110 : 130, unit, end: time.end, yRange: new Bokeh.Range1d({ start: 0, end: Math.max((top / size) * 1.4, 1e-3) }), yAxisLabel: name,
  });
  figure.yaxis.ticker = new Bokeh.BasicTicker({ desired_num_ticks: 3 });
  const x = curve.seconds.map((seconds) => seconds * unit.factor);
  const y = curve.bytes.map((bytes) => bytes / size);
  const area = figure.varea_step({ x, y1: x.map(() => 0), y2: y, step_mode: "after", fill_alpha: 0.35 });
  const line = figure.step({ x, y, mode: "after", line_width: 2 });
  const peak = figure.scatter({ x: [curve.peak_seconds * unit.factor], y: [curve.peak_bytes / size], marker: "diamond", size: 11 });
  const limit = new Bokeh.Span({ location: top / size, dimension: "width", line_dash: isFar ? [2, 4] : [6, 4], line_width: 2 });
  const words = `limit ${formatBytes(curve.limit_bytes)}${isFar ? ", not to scale" : ""}`;
  const label = new Bokeh.Label({ x: 6, y: top / size, x_units: "screen", y_units: "data", text: words, text_font_size: "12px", y_offset: 1 });
  figure.add_layout(limit);
  figure.add_layout(label);
  const paint = () => {
    const color = readDeviceColor(curve.device);
    area.glyph.fill_color = color;
    line.glyph.line_color = color;
    peak.glyph.setv({ fill_color: readColor("page"), line_color: readColor("text"), line_width: 2 });
    limit.line_color = readColor("limit");
    label.text_color = readColor("text");
  };
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `Memory of ${holder.dataset.devices} over the step: at most ${formatBytes(curve.peak_bytes)} at ${formatSeconds(curve.peak_seconds)}; the limit is ${formatBytes(curve.limit_bytes)}.`);
  await showFigure(figure, holder, paint);
  time.bind(figure, unit);
  time.set(time.start_seconds, time.finish_seconds);
  holder.dataset.ready = "true";
}
