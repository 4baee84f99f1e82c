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
    indexes.set(report, { rowOf, nodesOf, crossing: new Map(report.crossings.map((item) => [item.value, item])) });
  }
  return indexes.get(report);
}

function nameSpan(report, timeline, i) {
  const segment = report.segments[timeline.segment[i]];
  return segment ? segment.title : timeline.label[i];
}

// The name of a row of the tree, with those of its parents; groups of repeats add nothing to it.
function namePath(tree, row) {
  const parts = [];
  for (let i = row; i >= 0; i = tree.parent[i]) if (i === row || !/ … /.test(tree.label[i])) parts.unshift(tree.label[i]);
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
  const segment = report.segments[timeline.segment[i]];
  const facts = [
    ["where", timeline.rows[timeline.row[i]].name],
    ["from", formatSeconds(timeline.start_seconds[i])],
    ["for", formatSeconds(timeline.finish_seconds[i] - timeline.start_seconds[i])],
  ];
  panel.replaceChildren(make("p", { class: "title" }, nameSpan(report, timeline, i)));
  if (segment) {
    facts.push(
      ["segment", segment.id], ["time", `${formatSeconds(segment.seconds)}, from ${segment.source}`],
      ["from node costs", formatSeconds(segment.planned_seconds)],
    );
    const nodes = indexReport(report).nodesOf[timeline.segment[i]] ?? [];
    panel.append(makeFacts(facts), makeNodeTable(report, nodes, `Nodes of ${segment.id}`));
  } else if (timeline.segment[i] >= 0) {
    panel.append(makeFacts([...facts, ["operator", timeline.detail[i]]]));
  } else {
    const crossing = indexReport(report).crossing.get(timeline.label[i]);
    const reader = timeline.reader[i] >= 0 ? nameSpan(report, timeline, timeline.reader[i]) : "";
    facts.push(["size", timeline.detail[i]], ["layer", crossing?.layer], ["first read by", reader], ["why", crossing?.reason]);
    panel.append(makeFacts(facts));
  }
}
