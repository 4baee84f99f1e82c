// Figures of BokehJS: their size, colours in light and dark, and ranges of time that move together.

const figures = new Set();
const DARK_QUERY = "(prefers-color-scheme: dark)";
// The axes of a timeline and of the memory below it stand at one place.
const LEFT_PIXELS = { wide: 176, narrow: 104 };
const NARROW_PIXELS = 600;
const PIXELS_PER_LETTER = 6.6;
const coarsePointer = matchMedia("(pointer: coarse)");

function readColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function readDeviceColor(device) {
  return readColor(device < 0 ? "quiet" : `device-${device % COLORS}`);
}

function findLeft(holder) {
  return holder.clientWidth < NARROW_PIXELS ? LEFT_PIXELS.narrow : LEFT_PIXELS.wide;
}

// Cuts the name of a row so that the axis has room for it.
function fitName(holder, name) {
  const letters = Math.floor((findLeft(holder) - 14) / PIXELS_PER_LETTER);
  return name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
}

// Returns a figure without a toolbar, over time in seconds times `unit.factor`.
function makeFigure(holder, { height, unit, end, yRange, yAxisLabel = null }) {
  const plotting = Bokeh.Plotting;
  const figure = plotting.figure({
    sizing_mode: "stretch_width", height, tools: [], toolbar_location: null, output_backend: "canvas",
    x_range: new Bokeh.Range1d({ start: 0, end: end * unit.factor }), y_range: yRange,
    min_border_left: findLeft(holder), min_border_right: 14, lod_threshold: null,
  });
  figure.xaxis.axis_label = unit.name;
  if (yAxisLabel) figure.yaxis.axis_label = yAxisLabel;
  if (!coarsePointer.matches) { // a finger scrolls the page, and uses the buttons
    const pan = new Bokeh.PanTool({ dimensions: "width" });
    figure.add_tools(pan);
    figure.toolbar.active_drag = pan;
  }
  return figure;
}

function paintFigure(figure) {
  const text = readColor("text");
  const quiet = readColor("quiet");
  const line = readColor("line");
  figure.setv({ background_fill_color: null, border_fill_color: null, outline_line_color: line });
  for (const axis of [figure.xaxis, figure.yaxis]) {
    axis.axis_label_text_color = quiet;
    axis.axis_label_text_font_style = "normal";
    axis.major_label_text_color = text;
    axis.major_label_text_font_size = "12px";
    axis.axis_line_color = line;
    axis.major_tick_line_color = line;
    axis.minor_tick_line_color = null;
  }
  figure.xgrid.grid_line_color = line;
  figure.ygrid.grid_line_color = null;
}

// Shows a figure; `paint` sets its colours, now and whenever light changes to dark.
async function showFigure(figure, holder, paint) {
  const repaint = () => {
    paintFigure(figure);
    paint();
  };
  repaint();
  figures.add(repaint);
  const plot = make("div", { class: "plot", "aria-hidden": "true" });
  holder.append(plot);
  await Bokeh.Plotting.show(figure, plot);
  skipInside(plot);
  return plot;
}

// Takes what BokehJS makes focusable out of the order of Tab: the elements around the plot have the keys.
function skipInside(root) {
  root.querySelectorAll("*").forEach((element) => {
    if (element.tabIndex >= 0) element.tabIndex = -1;
    if (element.shadowRoot) skipInside(element.shadowRoot);
  });
}

function repaintFigures() {
  figures.forEach((repaint) => repaint());
}

matchMedia(DARK_QUERY).addEventListener("change", repaintFigures);

function chooseUnit(seconds) {
  if (seconds < 1e-3) return { name: "µs", factor: 1e6 };
  return seconds < 1 ? { name: "ms", factor: 1e3 } : { name: "s", factor: 1 };
}

// Ranges of time that move together: those of one report.
class TimeWindow {
  constructor(end) {
    this.end = end;
    this.start_seconds = 0;
    this.finish_seconds = end;
    this.listeners = new Set();
    this.busy = false;
  }

  set(start, finish) {
    const width = Math.min(Math.max(finish - start, this.end * 1e-6), this.end);
    this.start_seconds = Math.min(Math.max(start, 0), this.end - width);
    this.finish_seconds = this.start_seconds + width;
    this.busy = true;
    this.listeners.forEach((listener) => listener(this));
    this.busy = false;
  }

  zoom(factor, center = (this.start_seconds + this.finish_seconds) / 2) {
    this.set(center - (center - this.start_seconds) * factor, center + (this.finish_seconds - center) * factor);
  }

  move(share) {
    const step = (this.finish_seconds - this.start_seconds) * share;
    this.set(this.start_seconds + step, this.finish_seconds + step);
  }

  // Binds the range of a figure, in both directions.
  bind(figure, unit) {
    const range = figure.x_range;
    this.listeners.add(() => range.setv({ start: this.start_seconds * unit.factor, end: this.finish_seconds * unit.factor }));
    range.on_change([range.properties.start, range.properties.end], () => {
      if (!this.busy) this.set(range.start / unit.factor, range.end / unit.factor);
    });
  }
}

// Calls `build` when an element comes near the window, so that a page with many charts opens quickly.
function whenNear(element, build) {
  const observer = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) {
      observer.disconnect();
      build();
    }
  }, { rootMargin: "300px" });
  observer.observe(element);
}
