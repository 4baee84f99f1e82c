// The graph with the cut: layers as boxes, laid out by dagre. A box opens into its parts; edges between devices stand out.

// Layers are opened, the largest first, as long as the picture has at most so many boxes.
const FIRST_BOXES = 24;
// More boxes than this are slow to lay out, and nobody sees through them.
const MAX_BOXES = 220;
const MAX_FOUND = 8;
const BOX = { width: 212, height: 46 };
const MAX_TITLE = 30;
const MIN_SCALE = 0.55;
const SVG = "http://www.w3.org/2000/svg";

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function shorten(text, length) {
  return text.length > length ? `${text.slice(0, length - 10)}…${text.slice(-9)}` : text;
}

class GraphPicture {
  constructor(holder, report) {
    this.report = report;
    this.tree = report.layers;
    this.sums = sumLayers(this.tree, report.devices.length);
    this.open = new Set();
    this.marked = -1;
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

  isRepeat(row) {
    return /: \d+ equal layers$/.test(this.tree.label[row]);
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

  // Opens layers that lie on several devices.
  openCut() {
    for (let boxes = this.list(), grew = true; grew;) {
      grew = false;
      for (const row of boxes) {
        const devices = this.sums[row].count.reduce((count, nodes) => count + (nodes > 0), 0);
        if (devices > 1 && this.list().length + this.sums[row].children.length <= MAX_BOXES) {
          this.open.add(row);
          grew = true;
        }
      }
      boxes = this.list();
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

  draw(focus = -1) {
    const boxes = this.list();
    const { edges, inside } = this.collectEdges(boxes);
    const layout = new dagre.graphlib.Graph({ compound: true });
    layout.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 34, marginx: 10, marginy: 10 });
    layout.setDefaultEdgeLabel(() => ({}));
    for (const row of boxes) layout.setNode(String(row), { ...BOX });
    for (const row of this.open) layout.setNode(String(row), {});
    for (const row of [...boxes, ...this.open]) if (this.tree.parent[row] >= 0) layout.setParent(String(row), String(this.tree.parent[row]));
    for (const edge of edges) layout.setEdge(String(edge.from), String(edge.to), { weight: edge.cut.size ? 1 : 2 });
    dagre.layout(layout);
    const { width, height } = layout.graph();
    const cut = edges.filter((edge) => edge.cut.size);
    const picture = makeSvg("svg", { viewBox: `0 0 ${width} ${height}` });
    const scale = Math.max(Math.min((this.frame.clientWidth - 4) / width, 1), MIN_SCALE);
    picture.setAttribute("width", width * scale);
    picture.setAttribute("height", height * scale);
    const opened = [...this.open].sort((a, b) => a - b);
    picture.append(
      ...opened.map((row) => this.drawCluster(row, layout.node(String(row)))),
      ...edges.map((edge) => this.drawEdge(edge, layout.edge(String(edge.from), String(edge.to)).points)),
      ...boxes.map((row) => this.drawBox(row, layout.node(String(row)), inside.get(row)?.size ?? 0)),
    );
    this.frame.replaceChildren(picture);
    const bytes = cut.reduce((sum, edge) => sum + [...edge.cut.values()].reduce((a, b) => a + b, 0), 0);
    const hidden = [...inside.values()].reduce((sum, values) => sum + values.size, 0);
    const crossing = cut.length ? `${cut.length} of ${edges.length} edges cross between devices, with ${formatBytes(bytes)}` : "No edge in the picture crosses between devices";
    this.status.textContent = `${crossing}${hidden ? `; ${hidden} values cross inside boxes: “Open the cut” shows them` : ""}.`;
    const target = this.frame.querySelector(`[data-row="${focus}"]`);
    if (target) {
      target.focus({ preventScroll: true });
      this.frame.scrollTop = (layout.node(String(focus)).y - BOX.height) * scale - this.frame.clientHeight / 3;
      this.frame.scrollLeft = layout.node(String(focus)).x * scale - this.frame.clientWidth / 2;
    }
  }

  describe(row) {
    const sum = this.sums[row];
    const seconds = sum.seconds.reduce((a, b) => a + b, 0);
    const what = sum.children.length ? `${sum.nodes} nodes` : this.tree.op[row];
    return [what, ...(seconds > 0 ? [formatSeconds(seconds)] : [])].join(" · ");
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
    const title = `${isLayer ? "+ " : ""}${this.tree.label[row]}`;
    const about = `${this.describe(row)} · ${inside ? `${inside} cut` : where}`;
    const shown = [shorten(title, MAX_TITLE), shorten(about, MAX_TITLE + 6)];
    box.append(makeSvg("text", { x: 8, y: 17 }, shown[0]), makeSvg("text", { class: "about", x: 8, y: 33 }, shown[1]));
    const name = `${this.tree.label[row]}: ${this.describe(row)}, on ${where}${inside ? `; ${inside} values cross inside` : ""}`;
    return this.button(box, row, name, isLayer ? false : null);
  }

  drawCluster(row, { x, y, width, height }) {
    const cluster = makeSvg("g", { class: "cluster", transform: `translate(${x - width / 2} ${y - height / 2})` });
    const shown = shorten(`− ${this.tree.label[row]}`, Math.floor(width / 7));
    cluster.append(makeSvg("rect", { width, height, rx: 8 }), makeSvg("text", { x: 8, y: 14 }, shown));
    return this.button(cluster, row, `${this.tree.label[row]}: close`, true);
  }

  drawEdge(edge, points) {
    const line = points.map(({ x, y }, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const [before, tip] = points.slice(-2);
    const angle = (Math.atan2(tip.y - before.y, tip.x - before.x) * 180) / Math.PI;
    const group = makeSvg("g", { class: edge.cut.size ? "edge cut" : "edge" });
    group.append(makeSvg("path", { d: line }), makeSvg("path", { class: "tip", d: "M0 0L-8 -4L-8 4Z", transform: `translate(${tip.x} ${tip.y}) rotate(${angle})` }));
    if (edge.cut.size) {
      const middle = points[Math.floor(points.length / 2)];
      const size = [...edge.cut.values()].reduce((a, b) => a + b, 0);
      group.append(makeSvg("text", { x: middle.x + 5, y: middle.y + 4 }, formatBytes(size)));
    }
    return group;
  }
}
