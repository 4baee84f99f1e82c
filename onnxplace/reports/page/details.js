// The panel of details: what a span, a node or a transfer is.

const indexes = new WeakMap();

// Rows of the layer tree by node, and nodes by segment.
function indexReport(report) {
  if (!indexes.has(report)) {
    const tree = report.layers;
    const rowOf = [];
    const nodesOf = [];
    tree.node.forEach((node, row) => {
      if (node < 0) return;
      rowOf[node] = row;
      (nodesOf[tree.segment[row]] ??= []).push(node);
    });
    const segment = new Map(report.segments.map((item, i) => [item.id, i]));
    indexes.set(report, { rowOf, nodesOf, segment, crossing: new Map(report.crossings.map((item) => [item.value, item])) });
  }
  return indexes.get(report);
}

// The index of the segment that a span computes, or -1: transfers and nodes of a placement have none.
function findSegment(report, timeline, i) {
  const computes = timeline.rows[timeline.row[i]].kind === "compute";
  return computes ? indexReport(report).segment.get(timeline.label[i]) ?? -1 : -1;
}

function nameSpan(report, timeline, i) {
  return report.segments[findSegment(report, timeline, i)]?.title ?? timeline.label[i];
}

// The name of a row of the tree, with those of its parents; groups of repeats add nothing to it.
function namePath(tree, row) {
  const parts = [];
  for (let i = row; i >= 0; i = tree.parent[i]) if (i === row || !/ … /.test(tree.label[i])) parts.unshift(tree.label[i].replace(/ \(part \d+\)/g, ""));
  return parts.join("/");
}

function makeFacts(facts) {
  const list = make("dl", { class: "facts" });
  for (const [name, text] of facts) if (text) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, text)));
  return list;
}

function describeCost(seconds, source) {
  if (!(seconds > 0)) return "";
  return source ? `${formatSeconds(seconds)}, ${source}` : formatSeconds(seconds);
}

function makeNodeTable(report, nodes, caption) {
  const tree = report.layers;
  const rows = nodes.map((node) => indexReport(report).rowOf[node]);
  return makeTable({
    caption, header: ["node", "operator", "shape", "cost", "source of the cost"], classes: ["", "short", "", "number", "short"],
    count: rows.length,
    row: (i) => [
      namePath(tree, rows[i]), tree.op[rows[i]], tree.shape[rows[i]] || "–",
      tree.seconds[rows[i]] > 0 ? formatSeconds(tree.seconds[rows[i]]) : "–", tree.source[rows[i]] || "–",
    ],
    text: (i) => `${namePath(tree, rows[i])} ${tree.op[rows[i]]}`,
  });
}

function showNode(panel, report, node) {
  const tree = report.layers;
  const row = indexReport(report).rowOf[node];
  panel.replaceChildren(make("p", { class: "title" }, namePath(tree, row)), makeFacts([
    ["operator", tree.op[row]], ["device", report.devices[tree.device[row]].id], ["shape", tree.shape[row]],
    ["cost", describeCost(tree.seconds[row], tree.source[row])], ["segment", report.segments[tree.segment[row]]?.id],
  ]));
}

function showSpan(panel, report, timeline, i) {
  const number = findSegment(report, timeline, i);
  const segment = report.segments[number];
  const facts = [
    ["where", timeline.rows[timeline.row[i]].name],
    ["from", formatSeconds(timeline.start_seconds[i])],
    ["for", formatSeconds(timeline.finish_seconds[i] - timeline.start_seconds[i])],
  ];
  panel.replaceChildren(make("p", { class: "title" }, nameSpan(report, timeline, i)));
  if (segment) {
    facts.push(
      ["segment", segment.id], [report.verdict.basis, formatSeconds(segment.seconds)],
      ["from node costs", formatSeconds(segment.planned_seconds)],
    );
    const nodes = indexReport(report).nodesOf[number] ?? [];
    panel.append(makeFacts(facts), makeNodeTable(report, nodes, `Nodes of ${segment.id}`));
  } else if (timeline.rows[timeline.row[i]].kind === "compute") {
    panel.append(makeFacts([...facts, ["operator", timeline.detail[i]]]));
  } else {
    const crossing = indexReport(report).crossing.get(timeline.label[i]);
    const reader = timeline.reader[i] >= 0 ? nameSpan(report, timeline, timeline.reader[i]) : "";
    facts.push(["size", timeline.detail[i]], ["layer", crossing?.layer], ["first read by", reader], ["why", crossing?.reason]);
    panel.append(makeFacts(facts));
  }
}
