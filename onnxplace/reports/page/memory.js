// Memory over a step: an area for each device, its peak, and its limit where that is near.

// A limit above this multiple of the peak would flatten the curve: the text above it says how far away it is.
const MAX_LIMIT_RATIO = 3;

async function drawMemory(holder, report, curve, time) {
  const unit = chooseUnit(time.end);
  const top = curve.limit_bytes <= MAX_LIMIT_RATIO * curve.peak_bytes ? Math.max(curve.limit_bytes, curve.peak_bytes) : curve.peak_bytes;
  const [size, name] = top >= 2 ** 30 ? [2 ** 30, "GiB"] : top >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  const figure = makeFigure({
    height: 150, unit, end: time.end, yRange: new Bokeh.Range1d({ start: 0, end: Math.max((top / size) * 1.12, 1e-3) }), yAxisLabel: name,
  });
  const x = curve.seconds.map((seconds) => seconds * unit.factor);
  const y = curve.bytes.map((bytes) => bytes / size);
  const area = figure.varea_step({ x, y1: x.map(() => 0), y2: y, step_mode: "after", fill_alpha: 0.35 });
  const line = figure.step({ x, y, mode: "after", line_width: 2 });
  const peak = figure.scatter({ x: [curve.peak_seconds * unit.factor], y: [curve.peak_bytes / size], marker: "diamond", size: 11 });
  const limit = new Bokeh.Span({ location: curve.limit_bytes / size, dimension: "width", line_dash: [6, 4], line_width: 2 });
  figure.add_layout(limit);
  const paint = () => {
    const color = readDeviceColor(curve.device);
    area.glyph.fill_color = color;
    line.glyph.line_color = color;
    peak.glyph.setv({ fill_color: readColor("page"), line_color: readColor("text"), line_width: 2 });
    limit.line_color = readColor("limit");
  };
  holder.setAttribute("role", "img");
  const device = report.devices[curve.device].id;
  holder.setAttribute("aria-label", `Memory of ${device} over the step: at most ${formatBytes(curve.peak_bytes)} at ${formatSeconds(curve.peak_seconds)}; the limit is ${formatBytes(curve.limit_bytes)}.`);
  await showFigure(figure, holder, paint);
  time.bind(figure, unit);
  time.set(time.start_seconds, time.finish_seconds);
  holder.dataset.ready = "true";
}
