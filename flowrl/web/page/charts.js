// The drawings of the page: the plan as a graph, curves, bars. Text is set as text, never as HTML.
"use strict";

const COLORS = ["#2f81d0", "#d9700c", "#1a9a68", "#b85c9a", "#b99000", "#6c6ce0", "#7b8794"];
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function drawn(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (typeof value !== "number") return typeof value === "string" ? value : JSON.stringify(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size >= 1e-3 || size === 0 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// -- the plan ------------------------------------------------------------------------------------

const BOX = { width: 168, height: 58, gapX: 56, gapY: 22 };

// Return the place of each stage; its column is its longest way from a source.
function layout(stages) {
  const byId = new Map(stages.map((stage) => [stage.id, stage]));
  const columns = new Map();
  const columnOf = (stage) => {
    if (!columns.has(stage.id)) {
      const before = stage.parents.map((id) => columnOf(byId.get(id)));
      columns.set(stage.id, before.length ? 1 + Math.max(...before) : 0);
    }
    return columns.get(stage.id);
  };
  // a branch has a row of its own, which the edge to its union does not cross
  const rows = new Map();
  let lastRow = 0;
  const place = (stage, row) => {
    rows.set(stage.id, row);
    columnOf(stage);
    stage.parents.forEach((id, i) => {
      if (!rows.has(id)) place(byId.get(id), i === 0 ? row : lastRow += 1);
    });
  };
  place(stages[0], 0); // the end of the plan
  return new Map(stages.map((stage) => [stage.id, {
    x: 8 + columns.get(stage.id) * (BOX.width + BOX.gapX),
    y: 8 + rows.get(stage.id) * (BOX.height + BOX.gapY),
  }]));
}

function queueOf(stage) {
  for (const name of ["queue_size", "queued", "inqueue_size", "rows"]) {
    if (stage.values[name] !== undefined) return `${name.replace("_", " ")} ${short(stage.values[name])}`;
  }
  return "";
}

// Draw the stages with bars of their shares, and the edges with the items per second.
function drawPlan(target, activity, selected, onSelect) {
  const { stages, seconds } = activity;
  const places = layout(stages);
  const width = Math.max(...[...places.values()].map((p) => p.x)) + BOX.width + 8;
  const height = Math.max(...[...places.values()].map((p) => p.y)) + BOX.height + 8;
  const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "the plan as a graph, from its sources to the report" });
  for (const stage of stages) {
    for (const id of stage.parents) {
      const from = places.get(id), to = places.get(stage.id);
      const parent = stages.find((other) => other.id === id);
      const [x1, y1] = [from.x + BOX.width, from.y + BOX.height / 2];
      const [x2, y2] = [to.x, to.y + BOX.height / 2], middle = (x1 + x2) / 2;
      const label = drawn("text", { x: x1 + 4, y: y1 - 5 });
      label.textContent = `${short(parent.items / seconds)}/s`;
      svg.append(drawn("g", { class: "edge" },
        drawn("path", { d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` }), label));
    }
  }
  for (const stage of stages) svg.append(drawStage(stage, places.get(stage.id), seconds,
    stage.id === selected, onSelect));
  target.replaceChildren(svg);
}

function drawStage(stage, place, seconds, isSelected, onSelect) {
  const node = drawn("g", { class: isSelected ? "node selected" : "node", tabindex: 0,
    role: "button", transform: `translate(${place.x},${place.y})`, "data-id": stage.id });
  const title = drawn("title");
  title.textContent = `${stage.title}\n${stage.line}`;
  const name = drawn("text", { x: 8, y: 18 });
  name.textContent = stage.name.length > 21 ? `${stage.name.slice(0, 20)}…` : stage.name;
  const figures = drawn("text", { x: 8, y: 34, class: "faint" });
  figures.textContent = [`busy ${percent(stage.busy)}`, queueOf(stage)].filter(Boolean).join(", ");
  node.append(title, drawn("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 6 }),
    name, figures);
  let x = 8;
  for (const kind of ["busy", "waiting", "blocked"]) {
    const length = stage[kind] * (BOX.width - 16);
    node.append(drawn("rect", { class: `fill-${kind}`, x, y: 42, width: Math.max(length, 0),
      height: 8 }));
    x += length;
  }
  node.addEventListener("click", () => onSelect(stage.id));
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onSelect(stage.id); }
  });
  return node;
}

// -- curves --------------------------------------------------------------------------------------

const charts = new Map();

// Draw lines over a common axis; `lines` has {label, x, y, color}.
function drawLines(target, lines, options = {}) {
  const table = lines.length === 1 ? [lines[0].x, lines[0].y]
    : lines.length ? uPlot.join(lines.map((line) => [line.x, line.y])) : [[], []];
  const style = [css("--text"), css("--line")].join();
  const key = JSON.stringify([lines.map((line) => [line.label, line.color]), options.time, style]);
  const known = charts.get(target.id);
  const size = { width: Math.max(target.clientWidth, 200), height: options.height || 240 };
  if (known && known.key === key) {
    known.plot.setData(table);
    if (known.plot.width !== size.width) known.plot.setSize(size);
    return;
  }
  if (known) known.plot.destroy();
  const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 },
    ticks: { stroke: css("--line"), width: 1 } };
  const plot = new uPlot({
    ...size, legend: { show: true, live: true },
    scales: { x: { time: Boolean(options.time) }, ...(options.share ? { y: { range: [0, 1] } } : {}) },
    axes: [axis, { ...axis, size: 64, values: (_, values) => values.map(
      options.share ? percent : short) }],
    series: [{ label: options.xLabel || "env steps" }, ...lines.map((line) => ({
      label: line.label, stroke: line.color, width: 1.5, spanGaps: true,
      points: { show: line.x.length < 3 },
      value: (_, value) => value === null || value === undefined ? "–"
        : options.share ? percent(value) : short(value) }))],
  }, table, target);
  charts.set(target.id, { plot, key });
}

// Return an exponential moving average; `weight` is that of the past.
function smoothed(values, weight) {
  let mean = 0, correction = 1;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    correction *= weight;
    return mean / (1 - correction);
  });
}

// -- bars and tables -----------------------------------------------------------------------------

function drawHistogram(target, counts) {
  if (!counts.length) return target.replaceChildren("no fragments with known weights yet");
  const most = Math.max(...counts.map(([, count]) => count)), width = 340, height = 120;
  const step = width / counts.length;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height + 18}`, width: "100%",
    role: "img", "aria-label": "histogram of the policy lag" });
  counts.forEach(([lag, count], i) => {
    const size = count / most * height;
    const bar = drawn("rect", { class: "lag", x: i * step + 1, y: height - size,
      width: Math.max(step - 2, 1), height: size });
    const title = drawn("title");
    title.textContent = `${lag} updates: ${count} fragments`;
    bar.append(title);
    svg.append(bar);
    if (i % Math.ceil(counts.length / 12) === 0) {
      const text = drawn("text", { x: i * step + step / 2, y: height + 14, "text-anchor": "middle",
        "font-size": 11, fill: "currentColor" });
      text.textContent = lag;
      svg.append(text);
    }
  });
  target.replaceChildren(svg);
}

function fillTable(target, columns, rows, textColumns = []) {
  const head = element("tr", {}, ...columns.map((name, i) => element("th",
    textColumns.includes(i) ? { scope: "col", class: "text" } : { scope: "col" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((value, i) =>
    element("td", textColumns.includes(i) ? { class: "text" } : {},
      typeof value === "number" ? short(value) : String(value ?? "")))));
  target.replaceChildren(element("table", {}, element("thead", {}, head),
    element("tbody", {}, ...body)));
}
