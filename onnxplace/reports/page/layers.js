// The layers of the model: nested `details`, whose contents are built when they are opened.

// Sums of each layer: nodes and seconds, by device.
function sumLayers(tree, devices) {
  const rows = tree.label.map(() => ({ nodes: 0, count: new Float64Array(devices), seconds: new Float64Array(devices), children: [] }));
  for (let i = tree.label.length - 1; i >= 0; i--) {
    const row = rows[i];
    if (tree.device[i] >= 0) {
      row.nodes = 1;
      row.count[tree.device[i]] = 1;
      row.seconds[tree.device[i]] = tree.seconds[i] ?? 0;
    }
    row.children.reverse();
    if (tree.parent[i] < 0) continue;
    const parent = rows[tree.parent[i]];
    parent.nodes += row.nodes;
    parent.children.push(i);
    for (let device = 0; device < devices; device++) {
      parent.count[device] += row.count[device];
      parent.seconds[device] += row.seconds[device];
    }
  }
  return rows;
}

function fillLayers(holder, report) {
  const tree = report.layers;
  const sums = sumLayers(tree, report.devices.length);
  const roots = [...tree.label.keys()].filter((i) => tree.parent[i] < 0);

  function describe(i) {
    const total = sums[i].seconds.reduce((a, b) => a + b, 0);
    const by = total > 0 ? sums[i].seconds : sums[i].count;
    const whole = by.reduce((a, b) => a + b, 0) || 1;
    const parts = [...by.keys()].filter((device) => sums[i].count[device] > 0);
    const bar = make("span", { class: "shares", "aria-hidden": "true" });
    for (const device of parts) bar.append(make("span", { class: `device-${device % COLORS}`, style: `flex: ${by[device] / whole}` }));
    const where = parts.length === 1
      ? report.devices[parts[0]].id
      : parts.map((device) => `${report.devices[device].id} ${Math.round((100 * by[device]) / whole)} %`).join(", ");
    const count = `${sums[i].nodes} node${sums[i].nodes === 1 ? "" : "s"}`;
    return { about: [count, ...(total > 0 ? [formatSeconds(total)] : []), where].join(" · "), bar };
  }

  function build(indices, parent) {
    let list = null;
    for (const i of indices) {
      if (!sums[i].children.length) {
        if (!list) parent.append(list = make("ul"));
        const swatch = make("span", { class: `swatch device-${tree.device[i] % COLORS}`, "aria-hidden": "true" });
        const seconds = tree.seconds[i] > 0 ? `${formatSeconds(tree.seconds[i])} · ` : "";
        list.append(make("li", {}, swatch, make("span", { class: "name" }, tree.label[i]), " ", make("span", { class: "about" }, `${tree.op[i]} · ${seconds}${report.devices[tree.device[i]].id}`)));
        continue;
      }
      list = null;
      const { about, bar } = describe(i);
      const details = make("details", {}, make("summary", {}, make("span", { class: "name" }, tree.label[i]), " ", make("span", { class: "about" }, about), bar));
      fillWhenOpened(details, () => build(sums[i].children, details));
      parent.append(details);
    }
  }

  build(roots, holder);
  if (roots.length === 1) holder.querySelector("details")?.setAttribute("open", "");
}
