// The graph with the cut: layers as boxes. A box opens into its parts; edges between devices stand out.
// The tree of layers is made so that edges between its boxes never run in a circle: all of them run down.

// Layers are opened, the largest first, as long as the picture has at most so many boxes.
const FIRST_BOXES = 24;
// Nobody sees through more boxes than this.
const MAX_BOXES = 220;
// Up to so many boxes, dagre lays them out, with edges around boxes; it takes seconds for more.
const MAX_ROUTED = 60;
// Pictures of dagre that would be scaled by less to fit the page are laid out in rows, which take this scale.
const MIN_ROUTED_SCALE = 0.5;
const ROW_SCALE = 0.8;
const MAX_FOUND = 8;
const BOX = { width: 232, height: 46 };
const NARROW_BOX = { width: 168, height: 46 };
const SPACE = 16;
const ROW_SPACE = 40;
// Around the boxes inside an open one; its title is above them.
const MARGIN = 6;
const HEADER = 24;
// Texts begin so far from the left of their box, and end so far from its right.
const INDENT = 8;
const FONT_PIXELS = { title: 12, about: 11 };
const SVG = "http://www.w3.org/2000/svg";

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const ruler = document.createElement("canvas").getContext("2d");

function measureText(text, kind) {
  ruler.font = `${kind === "title" ? "" : "600 "}${FONT_PIXELS[kind]}px system-ui, sans-serif`;
  return ruler.measureText(text).width;
}

// A text that is at most so wide; of a longer one, the middle is left out.
function fitText(text, width, kind) {
  let shown = text;
  for (let kept = text.length - 1; kept > 1 && measureText(shown, kind) > width; kept--) {
    shown = `${text.slice(0, Math.ceil(kept * 0.6))}…${text.slice(text.length - Math.floor(kept * 0.4))}`;
  }
  return shown;
}

function describeCut(cut) {
  return formatBytes([...cut.values()].reduce((a, b) => a + b, 0));
}

class GraphPicture {
  constructor(holder, report) {
    this.report = report;
    this.tree = report.layers;
    this.sums = sumLayers(this.tree, report.devices.length);
    this.open = new Set();
    this.marked = -1;
    this.box = holder.clientWidth < NARROW_PIXELS ? NARROW_BOX : BOX;
    this.frame = make("div", { class: "graph", role: "group", "aria-label": `Graph of ${report.title}` });
    this.status = make("output", { "aria-live": "polite" });
    this.panel = make("div", { class: "panel" });
    this.found = make("ul", { class: "found" });
    const input = make("input", { type: "search", placeholder: "Find a node", "aria-label": "Find a node in the graph", oninput: () => this.find(input.value) });
    holder.append(
      make("div", { class: "controls" }, input, make("button", { type: "button", onclick: () => this.reset() }, "Collapse"),
        make("button", { type: "button", onclick: () => this.openCut() }, "Open the cut")),
      this.found, this.frame, this.status, this.panel,
    );
    this.reset();
  }

  children(row) {
    return row < 0 ? [...this.tree.label.keys()].filter((i) => this.tree.parent[i] < 0) : this.sums[row].children;
  }

  // Boxes in the picture: rows that are not open, all of whose parents are.
  list(row = -1, into = []) {
    for (const child of this.children(row)) {
      if (this.open.has(child)) this.list(child, into);
      else into.push(child);
    }
    return into;
  }

  // Whether boxes inside are much alike: equal layers, or the parts of a split operator.
  isRepeat(row) {
    const parts = this.sums[row].children.map((child) => this.tree.label[child]);
    return /: \d+ equal layers$/.test(this.tree.label[row]) || parts.every((part) => /^(shard|copy)\d+$/.test(part));
  }

  // Opens layers as long as there are few boxes; repeats stay closed.
  reset() {
    this.open.clear();
    this.marked = -1;
    for (;;) {
      const boxes = this.list();
      const next = boxes
        .filter((row) => this.sums[row].children.length && !this.isRepeat(row))
        .filter((row) => boxes.length - 1 + this.sums[row].children.length <= FIRST_BOXES)
        .sort((a, b) => this.sums[b].nodes - this.sums[a].nodes)[0];
      if (next === undefined) break;
      this.open.add(next);
    }
    this.draw();
  }

  // Opens layers in which values cross.
  openCut() {
    for (let grew = true; grew;) {
      const boxes = this.list();
      let room = MAX_BOXES - boxes.length;
      grew = false;
      for (const row of this.collectEdges(boxes).inside.keys()) {
        const more = this.sums[row].children.length - 1;
        if (more > room) continue;
        this.open.add(row);
        room -= more;
        grew = true;
      }
    }
    this.draw();
  }

  toggle(row) {
    if (!this.sums[row].children.length) {
      this.marked = row;
      showNode(this.panel, this.report, this.tree.node[row]);
    } else if (this.open.has(row)) this.open.delete(row);
    else if (this.list().length + this.sums[row].children.length <= MAX_BOXES) this.open.add(row);
    else {
      this.status.textContent = `That is more than ${MAX_BOXES} boxes: close others first.`;
      return;
    }
    this.draw(row);
  }

  find(words) {
    // Modules are written model.layers.0 as well as model/layers.0.
    const wanted = words.toLowerCase().replaceAll("/", ".").split(/\s+/).filter(Boolean);
    this.found.replaceChildren();
    if (!wanted.length) return;
    for (let row = 0; row < this.tree.label.length && this.found.children.length < MAX_FOUND; row++) {
      const name = namePath(this.tree, row);
      const text = `${name} ${this.tree.op[row]}`.toLowerCase().replaceAll("/", ".");
      if (!wanted.every((word) => text.includes(word))) continue;
      this.found.append(make("li", {}, make("button", { type: "button", onclick: () => this.show(row) }, name)));
    }
    if (!this.found.children.length) this.found.append(make("li", {}, "No node has such a name or operator."));
  }

  show(row) {
    this.found.replaceChildren();
    this.reset();
    for (let i = this.tree.parent[row]; i >= 0; i = this.tree.parent[i]) this.open.add(i);
    this.marked = row;
    if (this.tree.node[row] >= 0) showNode(this.panel, this.report, this.tree.node[row]);
    this.draw(row);
  }

  // Edges between boxes, with the values on them that change devices; and the number of such values inside each box.
  collectEdges(boxes) {
    const boxOf = new Int32Array(this.tree.label.length).fill(-1);
    const mark = (row, box) => {
      boxOf[row] = box;
      for (const child of this.sums[row].children) mark(child, box);
    };
    for (const box of boxes) mark(box, box);
    const { source, reader, bytes } = this.report.edges;
    const { rowOf } = indexReport(this.report);
    const edges = new Map();
    const inside = new Map();
    for (let i = 0; i < source.length; i++) {
      const [from, to] = [rowOf[source[i]], rowOf[reader[i]]];
      const isCut = this.tree.device[from] !== this.tree.device[to];
      // A value that several nodes of a device read crosses once.
      const way = `${source[i]} ${this.tree.device[to]}`;
      if (boxOf[from] === boxOf[to]) {
        if (isCut) inside.set(boxOf[from], (inside.get(boxOf[from]) ?? new Set()).add(way));
        continue;
      }
      const key = boxOf[from] * boxOf.length + boxOf[to];
      if (!edges.has(key)) edges.set(key, { from: boxOf[from], to: boxOf[to], cut: new Map() });
      if (isCut) edges.get(key).cut.set(way, bytes[i]);
    }
    return { edges: [...edges.values()], inside };
  }

  // Returns the size of the picture, the places of boxes by their middle, and the lines of edges.
  layOut(boxes, edges) {
    const routed = boxes.length <= MAX_ROUTED ? this.routeAround(boxes, edges) : null;
    return routed && routed.width * MIN_ROUTED_SCALE <= this.frame.clientWidth ? routed : this.layOutRows(edges);
  }

  routeAround(boxes, edges) {
    const layout = new dagre.graphlib.Graph({ compound: true });
    layout.setGraph({ rankdir: "TB", nodesep: SPACE, edgesep: SPACE / 2, ranksep: ROW_SPACE, marginx: MARGIN, marginy: MARGIN });
    const shown = [...boxes, ...this.open];
    for (const row of shown) layout.setNode(String(row), this.open.has(row) ? {} : { ...this.box });
    for (const row of shown) if (this.tree.parent[row] >= 0) layout.setParent(String(row), String(this.tree.parent[row]));
    for (const { from, to, cut } of edges) {
      const label = cut.size ? { width: measureText(describeCut(cut), "about") + 8, height: 16, labelpos: "c" } : {};
      layout.setEdge(String(from), String(to), { weight: cut.size ? 1 : 2, ...label });
    }
    dagre.layout(layout);
    const places = new Map(shown.map((row) => [row, layout.node(String(row))]));
    const lines = edges.map(({ from, to }) => layout.edge(String(from), String(to)));
    // dagre leaves room for boxes and labels alone; lines that run around them may be further out.
    const points = lines.flatMap((line) => line.points);
    const across = points.map(({ x }) => x);
    const shift = Math.max(0, MARGIN - Math.min(...across));
    for (const item of new Set([...places.values(), ...lines, ...points])) if (item.x !== undefined) item.x += shift;
    const { width, height } = layout.graph();
    return { width: Math.max(width, Math.max(...across) + MARGIN) + shift, height, places, lines };
  }

  // Rows of boxes, each below all that it reads, in the width of the frame; edges run behind boxes.
  layOutRows(edges) {
    const { width, height, items } = this.arrange(-1, edges, this.frame.clientWidth / ROW_SCALE);
    const places = new Map(items.map((item) => [item.row, { ...item, x: item.x + item.width / 2, y: item.y + item.height / 2 }]));
    const lines = edges.map(({ from, to }) => {
      const [source, reader] = [places.get(from), places.get(to)];
      const [begin, end] = [source.y + source.height / 2, reader.y - reader.height / 2];
      const turn = { x: source.x, y: begin + ROW_SPACE / 2 };
      const points = [{ x: source.x, y: begin }, turn, { x: reader.x, y: end - ROW_SPACE / 2 }, { x: reader.x, y: end }];
      // The edges that leave a box have one label.
      const cut = new Map(edges.filter((edge) => edge.from === from).flatMap((edge) => [...edge.cut]));
      return { points, ...turn, cut };
    });
    return { width, height, places, lines };
  }

  // Returns the size of what is inside an open box, or of the picture, with the places of the boxes in it.
  arrange(parent, edges, room) {
    const find = (row) => (row < 0 || this.tree.parent[row] === parent ? row : find(this.tree.parent[row]));
    const inner = edges.map(({ from, to }) => [find(from), find(to)]).filter(([from, to]) => from >= 0 && to >= 0 && from !== to);
    // Children are listed after what they read.
    const level = new Map();
    for (const child of this.children(parent)) {
      const above = inner.filter(([, to]) => to === child).map(([from]) => level.get(from) ?? -1);
      level.set(child, Math.max(-1, ...above) + 1);
    }
    const rows = [];
    for (const child of [...level.keys()].sort((a, b) => level.get(a) - level.get(b))) {
      const size = this.open.has(child) ? this.arrange(child, edges, room - 2 * MARGIN) : { ...this.box, items: [] };
      let row = rows.at(-1);
      if (row?.level !== level.get(child) || row.width + SPACE + size.width > room - 2 * MARGIN) {
        rows.push(row = { level: level.get(child), width: -SPACE, height: 0, cells: [] });
      }
      row.cells.push({ child, left: row.width + SPACE, size });
      row.width += SPACE + size.width;
      row.height = Math.max(row.height, size.height);
    }
    const width = Math.max(...rows.map((row) => row.width));
    let y = HEADER;
    const items = [];
    for (const row of rows) {
      for (const { child, left, size } of row.cells) {
        const x = MARGIN + left + (width - row.width) / 2;
        items.push({ row: child, x, y, width: size.width, height: size.height });
        for (const item of size.items) items.push({ ...item, x: item.x + x, y: item.y + y });
      }
      y += row.height + ROW_SPACE;
    }
    return { width: width + 2 * MARGIN, height: y - ROW_SPACE + MARGIN, items };
  }

  draw(focus = -1) {
    const boxes = this.list();
    const { edges, inside } = this.collectEdges(boxes);
    const { width, height, places, lines } = this.layOut(boxes, edges);
    const cut = edges.filter((edge) => edge.cut.size);
    const picture = makeSvg("svg", { viewBox: `0 0 ${width} ${height}` });
    // The style makes it as narrow as the frame, also when that changes.
    picture.setAttribute("width", width);
    const opened = [...this.open].sort((a, b) => a - b);
    picture.append(
      ...edges.map((edge, i) => this.drawEdge(edge, lines[i].points)),
      ...edges.flatMap((edge, i) => (edge.cut.size ? [this.drawSize(lines[i].cut ?? edge.cut, lines[i])] : [])),
      ...opened.map((row) => this.drawCluster(row, places.get(row))),
      ...boxes.map((row) => this.drawBox(row, places.get(row), inside.get(row)?.size ?? 0)),
    );
    this.frame.replaceChildren(picture);
    const bytes = cut.reduce((sum, edge) => sum + [...edge.cut.values()].reduce((a, b) => a + b, 0), 0);
    const hidden = [...inside.values()].reduce((sum, values) => sum + values.size, 0);
    const crossing = cut.length ? `${cut.length} of ${edges.length} edges cross between devices, with ${formatBytes(bytes)}` : "No edge in the picture crosses between devices";
    this.status.textContent = `${crossing}${hidden ? `; ${hidden} values cross inside boxes: “Open the cut” shows them` : ""}.`;
    const target = this.frame.querySelector(`[data-row="${focus}"]`);
    if (target) {
      const scale = picture.clientWidth / width;
      target.focus({ preventScroll: true });
      this.frame.scrollTop = (places.get(focus).y - this.box.height) * scale - this.frame.clientHeight / 3;
    }
  }

  describe(row) {
    const sum = this.sums[row];
    const seconds = sum.seconds.reduce((a, b) => a + b, 0);
    const what = sum.children.length ? `${sum.nodes} nodes` : this.tree.op[row];
    return [what, ...(seconds > 0 ? [formatSeconds(seconds)] : [])];
  }

  button(element, row, name, expanded) {
    element.setAttribute("role", "button");
    element.setAttribute("tabindex", "0");
    if (expanded !== null) element.setAttribute("aria-expanded", String(expanded));
    element.dataset.row = row;
    element.prepend(makeSvg("title", {}, name));
    element.addEventListener("click", () => this.toggle(row));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.toggle(row);
    });
    return element;
  }

  drawBox(row, { x, y, width, height }, inside) {
    const devices = [...this.sums[row].count.keys()].filter((device) => this.sums[row].count[device] > 0);
    const where = devices.map((device) => this.report.devices[device].id).join(", ");
    const isLayer = this.sums[row].children.length > 0;
    const box = makeSvg("g", { class: `box${inside ? " split" : ""}${isLayer ? " layer" : ""}${row === this.marked ? " marked" : ""}`, transform: `translate(${x - width / 2} ${y - height / 2})` });
    box.append(makeSvg("rect", { class: "ground", width, height, rx: 6 }));
    let left = 6;
    for (const device of devices) {
      const share = ((width - 12) * this.sums[row].count[device]) / this.sums[row].nodes;
      box.append(makeSvg("rect", { class: `share device-${device % COLORS}`, x: left, y: height - 7, width: share, height: 4 }));
      left += share;
    }
    const [label, repeats] = this.tree.label[row].split(/: (?=\d+ equal layers$)/);
    const title = `${isLayer ? "+ " : ""}${label}`;
    const about = [...(repeats ? [repeats] : []), ...this.describe(row), inside ? `${inside} cut` : where];
    const room = width - 2 * INDENT;
    while (about.length > 2 && measureText(about.join(" · "), "about") > room) about.splice(-2, 1);
    box.append(
      makeSvg("text", { x: INDENT, y: 17 }, fitText(title, room, "title")),
      makeSvg("text", { class: "about", x: INDENT, y: 33 }, fitText(about.join(" · "), room, "about")),
    );
    const name = `${this.tree.label[row]}: ${this.describe(row).join(" · ")}, on ${where}${inside ? `; ${inside} values cross inside` : ""}`;
    return this.button(box, row, name, isLayer ? false : null);
  }

  drawCluster(row, { x, y, width, height }) {
    const cluster = makeSvg("g", { class: "cluster", transform: `translate(${x - width / 2} ${y - height / 2})` });
    const shown = fitText(`− ${this.tree.label[row]}`, width - 2 * INDENT, "title");
    cluster.append(makeSvg("rect", { width, height, rx: 8 }), makeSvg("text", { x: INDENT, y: 13 }, shown));
    return this.button(cluster, row, `${this.tree.label[row]}: close`, true);
  }

  drawEdge(edge, points) {
    const line = points.map((point, i) => `${i ? "L" : "M"}${point.x.toFixed(1)} ${point.y.toFixed(1)}`).join("");
    const [before, tip] = points.slice(-2);
    const angle = (Math.atan2(tip.y - before.y, tip.x - before.x) * 180) / Math.PI;
    const group = makeSvg("g", { class: edge.cut.size ? "edge cut" : "edge" });
    group.append(makeSvg("path", { d: line }), makeSvg("path", { class: "tip", d: "M0 0L-8 -4L-8 4Z", transform: `translate(${tip.x} ${tip.y}) rotate(${angle})` }));
    return group;
  }

  drawSize(cut, { x, y }) {
    return makeSvg("text", { class: "size", x, y: y + 4, "text-anchor": "middle" }, describeCut(cut));
  }
}
