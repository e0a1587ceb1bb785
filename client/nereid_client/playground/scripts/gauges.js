// The view of the server: gauges that are read from /metrics while the view is visible.

const READ_EVERY_MS = 2000;
const NUM_SAMPLES = 60;
const FIRST_TOKEN = "time_to_first_token_seconds";

/**
 * The gauges. `read` returns the value for the present and the previous page of metrics, or
 * undefined if the value is not known. The values of a page are sums over all labels.
 */
const GAUGES = [
  { label: "Running requests", unit: "", read: (now) => now["num_requests_running"] },
  { label: "Waiting requests", unit: "", read: (now) => now["num_requests_waiting"] },
  {
    label: "KV cache in use",
    unit: "%",
    // With several engine processes, `now` contains the sums of their gauges. The sum of the
    // percentages would be wrong, so the percentage is computed from the sums of the blocks.
    read: (now) => (now["kv_cache_blocks_used"] / now["kv_cache_blocks"]) * 100,
  },
  {
    label: "Generated tokens per second",
    unit: "",
    read: (now, then) => increase(now, then, "generation_tokens_total") / seconds(now, then),
  },
  {
    label: "Time to the first token",
    unit: "ms",
    read: (now, then) =>
      (increase(now, then, `${FIRST_TOKEN}_sum`) / increase(now, then, `${FIRST_TOKEN}_count`)) *
      1000,
  },
  {
    label: "Requests in the frontend",
    unit: "",
    read: (now) => now["nereid_frontend_running_requests"],
  },
];

/** Return by how much a counter has increased, and at least 0 if the server was restarted. */
function increase(now, then, name) {
  return Math.max(0, now[name] - then[name]);
}

function seconds(now, then) {
  return (now.time - then.time) / 1000;
}

/**
 * Return the values of a page in the format of Prometheus, summed over all labels.
 *
 * The metrics of the engine have the prefix "nereid:" or, by a setting, "vllm:". It is removed.
 * Example: 'nereid:a{x="1"} 2\nnereid:a{x="2"} 3' returns { a: 5 }.
 */
function parseMetrics(page) {
  const values = {};
  for (const line of page.split("\n")) {
    const match = /^(?:nereid:|vllm:)?([a-zA-Z_]\w*)(?:\{.*\})? (\S+)/.exec(line);
    if (match) values[match[1]] = (values[match[1]] ?? 0) + Number(match[2]);
  }
  return values;
}

/** Shows one gauge: its value, and a line with the last values. */
class GaugeView {
  constructor(gauge) {
    this.gauge = gauge;
    this.samples = [];
    this.value = make("span", { className: "value", textContent: "–" });
    this.line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.setAttribute("viewBox", `0 0 ${NUM_SAMPLES - 1} 20`);
    chart.setAttribute("preserveAspectRatio", "none");
    chart.setAttribute("aria-hidden", "true");
    chart.append(this.line);
    const definition = make("dd", {}, this.value, chart);
    this.element = make("div", { className: "gauge" });
    this.element.append(make("dt", { textContent: gauge.label }), definition);
  }

  update(now, then) {
    const value = this.gauge.read(now, then);
    if (!Number.isFinite(value)) return;
    const digits = value !== 0 && value < 10 && !Number.isInteger(value) ? 1 : 0;
    this.value.textContent = `${value.toFixed(digits)} ${this.gauge.unit}`;
    this.samples = [...this.samples, value].slice(-NUM_SAMPLES);
    const highest = Math.max(...this.samples) || 1;
    const points = this.samples.map((sample, at) => `${at},${19 - (sample / highest) * 18}`);
    this.line.setAttribute("points", points.join(" "));
  }
}

function startGauges() {
  const views = GAUGES.map((gauge) => new GaugeView(gauge));
  byId("gauges").append(...views.map((view) => view.element));
  let then = {};
  const update = async () => {
    if (byId("server").hidden || document.visibilityState === "hidden") return;
    try {
      const now = parseMetrics(await (await send("metrics")).text());
      now.time = performance.now();
      const hasEngine = "num_requests_running" in now;
      byId("server-state").textContent = hasEngine
        ? `The values are read from /metrics every ${READ_EVERY_MS / 1000} seconds.`
        : "The metrics do not contain the values of the engine (setting metrics_url).";
      for (const view of views) view.update(now, then);
      then = now;
    } catch (error) {
      byId("server-state").textContent = error.message;
    }
  };
  setInterval(update, READ_EVERY_MS);
  byId("tab-server").addEventListener("click", update);
}
