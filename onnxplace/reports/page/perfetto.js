// The timelines in Perfetto's viewer: a click opens ui.perfetto.dev, which takes the trace by postMessage. It stays in
// the browser. A page that was opened as a file has no origin, and the viewer may not answer it: then the trace is saved.

const PERFETTO = "https://ui.perfetto.dev";
const PERFETTO_PATIENCE_MS = 10_000;
const PING_MS = 200;

// The Trace Event Format, in microseconds: a process for each timeline, a thread for each row.
function buildTrace(report) {
  const events = [];
  report.timelines.forEach((timeline, pid) => {
    events.push({ ph: "M", pid, tid: 0, name: "process_name", args: { name: timeline.name } });
    timeline.rows.forEach((row, tid) => {
      events.push({ ph: "M", pid, tid, name: "thread_name", args: { name: row.name } });
      events.push({ ph: "M", pid, tid, name: "thread_sort_index", args: { sort_index: tid } });
    });
    timeline.row.forEach((tid, i) => events.push({
      ph: "X", pid, tid, cat: timeline.rows[tid].kind, name: nameSpan(report, timeline, i),
      ts: timeline.start_seconds[i] * 1e6, dur: (timeline.finish_seconds[i] - timeline.start_seconds[i]) * 1e6,
      args: { what: timeline.label[i], detail: timeline.detail[i] },
    }));
  });
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
}

function saveTrace(text, fileName) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: address, download: fileName }).click();
  URL.revokeObjectURL(address);
}

function openInPerfetto(report, status) {
  const text = buildTrace(report);
  const fileName = `${report.source}.trace.json`;
  const viewer = window.open(PERFETTO);
  if (!viewer) {
    saveTrace(text, fileName);
    status.textContent = `The browser opened no window. The trace was saved as ${fileName}.`;
    return;
  }
  status.textContent = "Waiting for ui.perfetto.dev …";
  const began = Date.now();
  const timer = setInterval(() => {
    viewer.postMessage("PING", PERFETTO);
    if (Date.now() - began < PERFETTO_PATIENCE_MS) return;
    end(`Perfetto does not answer. The trace was saved as ${fileName}: open it there.`);
    saveTrace(text, fileName);
  }, PING_MS);
  const answer = (event) => {
    if (event.source !== viewer || event.data !== "PONG") return;
    viewer.postMessage({ perfetto: { buffer: new TextEncoder().encode(text).buffer, title: report.source, fileName } }, PERFETTO);
    end("Opened in Perfetto.");
  };
  function end(message) {
    clearInterval(timer);
    window.removeEventListener("message", answer);
    status.textContent = message;
  }
  window.addEventListener("message", answer);
}
