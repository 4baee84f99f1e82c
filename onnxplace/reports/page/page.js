// Builds what each report on the page shows, from the data below it.

const MAX_STEP_RATIO = 2;
const reports = JSON.parse(document.getElementById("data").textContent);
// Reports next to each other have one scale of time.
const MAX_SINGLE_RATIO = 1.25;
const lastSpan = Math.max(1e-9, ...reports.flatMap((report) => report.timelines.map((timeline) => timeline.end_seconds)));
// The best single device is in the picture unless it would squeeze the rest.
const singles = reports.map((report) => report.bound.single_device_seconds).filter((seconds) => seconds < MAX_SINGLE_RATIO * lastSpan);
const end = Math.max(lastSpan * 1.01, ...singles.map((seconds) => seconds * 1.01));

for (const article of document.querySelectorAll("article[data-report]")) {
  const report = reports[Number(article.dataset.report)];
  const time = new TimeWindow(end);
  // Memory is that of one step; a trace of many requests has a longer scale of its own.
  const stepEnd = Math.max(1e-9, ...reports.flatMap((other) => other.memory.map((curve) => curve.seconds.at(-1))));
  const memoryTime = end > MAX_STEP_RATIO * stepEnd ? new TimeWindow(stepEnd) : time;
  const fillers = { layercut: fillLayerCut, cut: fillCut, timeline: fillSpans, files: fillFiles, memory: fillMemory };
  for (const holder of article.querySelectorAll("[data-table]")) {
    const fill = () => fillers[holder.dataset.table](holder, report);
    if (holder.tagName === "DETAILS") fillWhenOpened(holder, fill);
    else fill();
  }
  for (const holder of article.querySelectorAll("[data-layers]")) fillLayers(holder, report);
  for (const holder of article.querySelectorAll("[data-graph]")) whenNear(holder, () => new GraphPicture(holder, report));
  for (const button of article.querySelectorAll("[data-perfetto]")) {
    const status = button.nextElementSibling;
    button.addEventListener("click", () => openInPerfetto(report, status));
    button.hidden = false;
  }
  for (const holder of article.querySelectorAll("[data-chart=timeline]")) drawTimeline(holder, report, time);
  for (const holder of article.querySelectorAll("[data-chart=memory]")) {
    const curve = report.memory[Number(holder.dataset.curve)];
    whenNear(holder, () => drawMemory(holder, report, curve, memoryTime));
  }
}
addThemeSwitch(document.querySelector("[data-theme]"));

// A link to a section opens it.
function openTarget() {
  document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
}
addEventListener("hashchange", openTarget);
openTarget();
document.documentElement.dataset.ready = "true";
