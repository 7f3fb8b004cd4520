// The page: get the data of runs, from the server or from the report, and show it.
"use strict";

const POLL_MS = 1000;
const PARTS = { "env.step": "env_step_s", "env.reset": "reset_s", inference: "inference_s",
  "storing rows": "collection_s", postprocessing: "postprocess_s", "loading weights": "weights_s" };
const embedded = document.getElementById("data");
const report = embedded ? JSON.parse(embedded.textContent) : null;
const state = { runs: [], run: 0, metric: "episode_reward_mean", chosen: null, selected: null, data: null,
  curves: [], hidden: new Set(), configs: [] };
const at = (id) => document.getElementById(id);

async function get(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: status ${response.status}`);
  return response.json();
}

async function load() {
  if (report) {
    state.data = report[state.run];
    chooseMetric();
    state.curves = report.map((run) => run.curves[state.metric] || { x: [], y: [] });
    state.configs = report.map((run) => run.config);
    return;
  }
  const runs = await get("/api/runs");
  const names = (list) => list.map((run) => `${run.id} ${run.name}`).join("\n");
  if (names(runs) !== names(state.runs)) await replaceRuns(runs);
  const { run } = state;
  const data = await get(`/api/runs/${run}`);
  if (run !== state.run) return;  // another run has been selected since
  state.data = data;
  state.configs[run] = data.config;
  chooseMetric();
  const { metric } = state;
  const curves = await get(`/api/curves?metric=${encodeURIComponent(metric)}`);
  if (metric === state.metric) state.curves = curves;
}

// Show another list of runs; those that remain keep their selection and settings.
async function replaceRuns(runs) {
  const { configs } = state;
  const indexOf = (i) => runs.findIndex((run) => run.id === state.runs[i]?.id);
  const index = indexOf(state.run);
  state.hidden = new Set([...state.hidden].map(indexOf).filter((i) => i >= 0));
  state.configs = [];
  configs.forEach((config, i) => { state.configs[indexOf(i)] = config; });
  if (index >= 0) state.run = index;
  else Object.assign(state, { runs: [], run: 0, selected: null });
  showRuns(runs);
  if (at("only-differences").checked) await loadConfigs();
}

// Offline training has no returns of training episodes.
function chooseMetric() {
  const names = shownMetrics();
  const wanted = [state.chosen, "episode_reward_mean", "evaluation/episode_reward_mean", names[0]];
  state.metric = wanted.find((name) => names.includes(name)) || "episode_reward_mean";
}

function shownMetrics() {
  return state.data.metrics.filter((name) => !report || state.data.curves[name]);
}

// The other runs' settings are needed for the differences only.
async function loadConfigs() {
  for (let i = 0; i < state.runs.length; i += 1) {
    if (!state.configs[i]) state.configs[i] = (await get(`/api/runs/${i}`)).config;
  }
}

async function refresh() {
  let problem = "the server does not answer";
  try {
    await load();
    problem = "the page cannot show the run";
    if (state.data) show();
  } catch (error) {
    at("status").textContent = `${problem} (${error.message})`;
  }
}

function show() {
  const { data } = state, activity = data.activity;
  document.title = `${data.name} – flowrl`;
  const steps = `iteration ${short(data.iteration)}, ${short(data.env_steps)} env steps`;
  const mean = data.return === null ? "" : `, return ${short(data.return)}`;
  at("status").textContent = `${data.running ? "running" : data.end}: ${steps}${mean}`;
  at("diagnosis").textContent = data.diagnosis;
  if (activity) {
    drawPlan(at("graph"), activity, state.selected, select);
    showStage();
    showWorkers(activity);
    showParts(activity);
  } else {
    const notYet = data.running ? "The plan has not been measured yet."
      : "The run ended before its plan was measured.";
    at("graph").textContent = data.config.monitor === false
      ? "The plan of this run is not measured: --no-monitor." : notYet;
    at("stage").hidden = true;
    for (const id of ["worker-state", "workers", "parts"]) at(id).replaceChildren();
  }
  showCurves();
  drawHistogram(at("lags"), data.lags);
  fillTable(at("events"), ["time", "event", ""], data.events.map((event) =>
    [new Date(1000 * event.time).toLocaleString(), event.kind, event.text]), [1, 2]);
  fillTable(at("counters"), ["counter", "value"], Object.entries(data.counters));
  showConfig();
  fillTable(at("results"), data.table.columns, data.table.rows);
  at("command").textContent = data.command;
  at("tree").textContent = data.plan;
  at("source").textContent = data.source;
  at("versions").textContent = data.versions;
}

function select(id) {
  state.selected = state.selected === id ? null : id;
  show();
}

function showStage() {
  const { activity, history, events } = state.data;
  const stage = activity.stages.find((other) => other.id === state.selected);
  at("stage").hidden = !stage;
  if (!stage) return;
  at("stage-title").textContent = stage.title;
  at("stage-line").textContent = stage.line;
  const values = Object.entries(stage.values).map(([name, value]) => `${name} ${
    typeof value === "number" ? short(value) : value}`);
  at("stage-figures").textContent = [`${short(stage.items / activity.seconds)} items/s`,
    `busy ${percent(stage.busy)}`, `waiting ${percent(stage.waiting)}`,
    `blocked ${percent(stage.blocked)}`, ...values].join(", ");
  const error = events.find((event) => event.kind === "failed" && event.stage === stage.line);
  at("stage-error").textContent = error ? `last error: ${error.text}` : "";
  const over = history.stages[stage.id];
  const colors = { busy: css("--busy"), waiting: css("--waiting"), blocked: css("--faint") };
  drawLines(at("stage-chart"), over ? Object.keys(colors).map((name) => ({ label: name,
    x: history.time, y: over[name], color: colors[name] })) : [],
  { time: true, share: true, height: 180, xLabel: "time" });
}

function showWorkers(activity) {
  const { workers, config } = state.data;
  let text = config.input_ ? "" : "sampling in this process";
  if (config.num_workers || workers.healthy) text = `${workers.healthy} healthy, ${workers.restarts} restarts`;
  at("worker-state").textContent = text;
  fillTable(at("workers"), ["worker", "env steps/s", "working", "memory [MB]", "waits for a core"],
    activity.workers.map((worker) => {
      const { sample_s: sample = 0, weights_s: weights = 0 } = worker.seconds;
      const own = Object.values(worker.operator_s).reduce((a, b) => a + b, 0)
        + (worker.callback_s.on_sample_end || 0);
      const share = (value) => percent(worker.period_s > 0 ? Math.min(value / worker.period_s, 1) : 0);
      return [String(worker.index), worker.period_s > 0 ? worker.env_steps / worker.period_s : 0,
        share(sample + weights + own), (worker.usage.rss_bytes || 0) / 1e6,
        share(worker.usage.cpu_wait_s || 0)];
    }));
}

function showParts(activity) {
  const rows = activity.workers.map((worker) => {
    const seconds = Object.values(PARTS).map((name) => worker.seconds[name] || 0);
    seconds[0] = Math.max(seconds[0] - seconds[1], 0); // env.step contains env.reset
    const total = Math.max(worker.period_s, 1e-9, seconds.reduce((a, b) => a + b, 0));
    const bar = element("div", { class: "bar" }, ...seconds.map((value, i) => element("span", {
      style: `width:${100 * value / total}%;background:${COLORS[i]}`,
      title: `${Object.keys(PARTS)[i]}: ${percent(value / total)}` })));
    return element("div", {}, `worker ${worker.index}`, bar);
  });
  const keys = element("p", { class: "hint" }, ...Object.keys(PARTS).map((name, i) =>
    element("span", {}, element("span", { class: "key", style: `background:${COLORS[i]}` }), name)));
  at("parts").replaceChildren(keys, ...rows);
}

function showCurves() {
  const metrics = at("metric"), names = shownMetrics();
  if (Array.from(metrics.options, (option) => option.value).join() !== names.join()) {
    metrics.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
  metrics.value = state.metric;
  const weight = Number(at("smoothing").value);
  const lines = state.curves.slice(0, state.runs.length).map((curve, i) => ({ label: state.runs[i].name, x: curve.x,
    y: smoothed(curve.y, weight), color: COLORS[i % COLORS.length], number: i }))
    .filter((line) => line.x.length && !state.hidden.has(line.number));
  drawLines(at("curve"), lines);
  if (state.runs.length > 1 && !at("shown-runs").children.length) {
    at("shown-runs").replaceChildren(...state.runs.map((run, i) => {
      const box = element("input", { type: "checkbox" });
      box.checked = !state.hidden.has(i);
      box.addEventListener("change", () => {
        state.hidden[box.checked ? "delete" : "add"](i);
        showCurves();
      });
      return element("label", {}, box, element("span", { class: "key",
        style: `background:${COLORS[i % COLORS.length]}` }), run.name);
    }));
  }
}

function showConfig() {
  const only = at("only-differences").checked, runs = state.runs.filter((_, i) => state.configs[i]),
    configs = state.configs.filter(Boolean);
  const text = (value) => typeof value === "string" ? value : JSON.stringify(value);
  const names = [...new Set(configs.flatMap(Object.keys))];
  const differs = (name) => new Set(configs.map((config) => text(config[name]))).size > 1;
  if (!only) {
    fillTable(at("config"), ["setting", "value"], Object.entries(state.data.config).map(
      ([name, value]) => [name, text(value)]), [1]);
    return;
  }
  fillTable(at("config"), ["setting", ...runs.map((run) => run.name)],
    names.filter(differs).map((name) => [name, ...configs.map((config) => text(config[name]))]),
    runs.map((_, i) => i + 1));
}

// Show the list of runs; the newest one is selected first.
function showRuns(runs) {
  if (!state.runs.length) state.run = runs.reduce((best, run, i) =>
    (run.changed > runs[best].changed ? i : best), 0);
  state.runs = runs;
  at("run").replaceChildren(...runs.map((run, i) => element("option", { value: i }, run.name)));
  at("run").value = state.run;
  at("shown-runs").replaceChildren();
}

async function start() {
  showRuns(report ? report.map((run) => ({ name: run.name, changed: 0 })) : await get("/api/runs"));
  at("run").addEventListener("change", () => {
    state.run = Number(at("run").value);
    state.selected = null;
    refresh();
  });
  at("metric").addEventListener("change", () => { state.chosen = at("metric").value; refresh(); });
  at("smoothing").addEventListener("input", showCurves);
  at("only-differences").addEventListener("change", async () => {
    if (!report && at("only-differences").checked) await loadConfigs();
    showConfig();
  });
  window.addEventListener("resize", () => { if (state.data) show(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  await refresh();
  const poll = async () => {
    if (!document.hidden) await refresh();
    setTimeout(poll, POLL_MS);
  };
  if (!report) setTimeout(poll, POLL_MS);
}

start();
