"use strict";
// Curves in SVG: each chart of the page's data is drawn into the element of its id. Drag over a part to see it larger.
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 380, HEIGHT = 200, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 34;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function drawn(tag, attributes, parent) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

const short = (value) => {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
};

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * base).find((each) => each >= raw);
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.min(last - first + 1, 2 * count + 1) || 0 }, (_, place) => (first + place) * step);
}

class Chart {
  constructor(place, chart) {
    this.lines = chart.lines; // {label, color, dash, points: [[step, value, error or null], ...]}
    this.hidden = new Set();
    this.cursor = null;
    const steps = this.lines.flatMap((line) => line.points.map((point) => point[0]));
    this.all = [Math.min(...steps), Math.max(...steps)];
    if (this.all[0] === this.all[1]) this.all = [this.all[0] - 1, this.all[1] + 1];
    this.range = this.all;
    this.svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img", class: "plot",
      "aria-label": `${chart.title}: ${this.lines.map((line) => line.label).join(", ")}. Arrow keys read values, + and - zoom, 0 shows all.` });
    this.readout = document.createElement("p");
    this.readout.className = "readout soft";
    this.readout.setAttribute("aria-live", "polite");
    place.append(this.svg, this.legend(), this.readout);
    this.listen();
    this.draw();
  }

  legend() {
    const made = document.createElement("div");
    made.className = "legend";
    this.lines.forEach((line, number) => {
      const button = document.createElement("button"), key = drawn("svg", { width: 26, height: 8, "aria-hidden": "true" });
      drawn("line", { x1: 1, y1: 4, x2: 25, y2: 4, "stroke-dasharray": line.dash, style: `stroke: ${line.color}` }, key);
      button.type = "button";
      button.append(key, line.label);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (!this.hidden.delete(number)) this.hidden.add(number);
        button.setAttribute("aria-pressed", String(!this.hidden.has(number)));
        this.draw();
      });
      made.append(button);
    });
    this.reset = document.createElement("button");
    this.reset.type = "button";
    this.reset.textContent = "show all";
    this.reset.addEventListener("click", () => this.zoom(this.all));
    made.append(this.reset);
    return made;
  }

  listen() {
    let start = null;
    this.svg.addEventListener("pointerdown", (event) => { start = this.stepAt(event); });
    this.svg.addEventListener("pointermove", (event) => { this.read(this.stepAt(event)); if (start !== null) this.mark(start, this.stepAt(event)); });
    this.svg.addEventListener("pointerleave", () => { start = null; this.read(null); });
    this.svg.addEventListener("pointerup", (event) => {
      const end = this.stepAt(event), from = start;
      start = null;
      if (from !== null && Math.abs(end - from) > (this.range[1] - this.range[0]) / 50) this.zoom([Math.min(from, end), Math.max(from, end)]);
      else this.draw();
    });
    this.svg.addEventListener("keydown", (event) => {
      const steps = this.steps(), now = this.cursor === null ? -1 : steps.indexOf(this.cursor);
      const [low, high] = this.range, middle = this.cursor ?? (low + high) / 2, half = (high - low) / 2;
      if (event.key === "ArrowRight") this.read(steps[Math.min(now + 1, steps.length - 1)]);
      else if (event.key === "ArrowLeft") this.read(steps[Math.max(now - 1, 0)]);
      else if (event.key === "+") this.zoom([Math.max(middle - half / 2, this.all[0]), Math.min(middle + half / 2, this.all[1])]);
      else if (event.key === "-") this.zoom([Math.max(middle - half * 2, this.all[0]), Math.min(middle + half * 2, this.all[1])]);
      else if (event.key === "0") this.zoom(this.all);
      else return;
      event.preventDefault();
    });
  }

  zoom(range) {
    const inside = this.lines.some((line) => line.points.some((point) => point[0] >= range[0] && point[0] <= range[1]));
    if (inside && range[1] - range[0] >= 1) this.range = range;
    this.cursor = null;
    this.draw();
  }

  shown() { return this.lines.filter((_, number) => !this.hidden.has(number)); }

  // Of a line the points within the range, and one to either side, so that it goes on to the edges.
  within(line) {
    const [low, high] = this.range, points = line.points;
    const first = points.findIndex((point) => point[0] >= low), behind = points.findIndex((point) => point[0] > high);
    if (first < 0) return [];
    return points.slice(Math.max(first - 1, 0), behind < 0 ? points.length : behind + 1);
  }

  steps() {
    const [low, high] = this.range, found = new Set();
    for (const line of this.shown()) for (const [step] of line.points) if (step >= low && step <= high) found.add(step);
    return [...found].sort((one, other) => one - other);
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * WIDTH;
    const share = Math.min(Math.max((x - LEFT) / (WIDTH - LEFT - RIGHT), 0), 1);
    return this.range[0] + share * (this.range[1] - this.range[0]);
  }

  x(step) { return LEFT + ((step - this.range[0]) / (this.range[1] - this.range[0])) * (WIDTH - LEFT - RIGHT); }

  y(value) { return TOP + ((this.high - value) / (this.high - this.low)) * (HEIGHT - TOP - BOTTOM); }

  draw() {
    const lines = this.shown().map((line) => [line, this.within(line)]);
    const ends = lines.flatMap(([, points]) => points.flatMap(([, value, error]) => [value - 2 * (error ?? 0), value + 2 * (error ?? 0)]));
    let low = ends.length ? Math.min(...ends) : 0, high = ends.length ? Math.max(...ends) : 1;
    const size = Math.max(Math.abs(low), Math.abs(high)), flat = high - low <= size * 1e-9; // but for rounding
    const room = flat ? size * 0.25 || 1 : (high - low) * 0.05;
    [this.low, this.high] = [low - room, high + room];
    this.svg.replaceChildren();
    for (const value of ticks(this.low, this.high, 5)) {
      drawn("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(value), y2: this.y(value), class: "grid" }, this.svg);
      drawn("text", { x: LEFT - 6, y: this.y(value) + 4, "text-anchor": "end" }, this.svg).textContent = short(value);
    }
    for (const step of ticks(...this.range, 6)) {
      if (!Number.isInteger(step)) continue;
      drawn("text", { x: this.x(step), y: HEIGHT - 16, "text-anchor": "middle" }, this.svg).textContent = step.toLocaleString("en");
    }
    drawn("text", { x: WIDTH - RIGHT, y: HEIGHT - 2, "text-anchor": "end" }, this.svg).textContent = "step";
    const clip = `clip${Math.random().toString(36).slice(2)}`;
    drawn("rect", { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM }, drawn("clipPath", { id: clip }, this.svg));
    const area = drawn("g", { "clip-path": `url(#${clip})` }, this.svg);
    for (const [line, points] of lines) {
      const style = `stroke: ${line.color}; fill: ${line.color}`, few = points.length <= 40;
      drawn("polyline", { points: points.map(([step, value]) => `${this.x(step)},${this.y(value)}`).join(" "),
        "stroke-dasharray": line.dash, style: `stroke: ${line.color}` }, area);
      for (const [step, value, error] of points) {
        if (few) drawn("circle", { cx: this.x(step), cy: this.y(value), r: 2.6, style }, area);
        if (error) drawn("line", { x1: this.x(step), x2: this.x(step), y1: this.y(value - 2 * error), y2: this.y(value + 2 * error), style }, area);
      }
    }
    this.rule = drawn("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "rule" }, this.svg);
    this.part = drawn("rect", { y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0, class: "part" }, this.svg);
    this.reset.disabled = this.range === this.all;
    this.read(this.cursor);
  }

  mark(from, to) {
    this.part.setAttribute("x", Math.min(this.x(from), this.x(to)));
    this.part.setAttribute("width", Math.abs(this.x(from) - this.x(to)));
  }

  // Show the values of the step nearest to this one.
  read(wanted) {
    const steps = this.steps();
    if (wanted === null || !steps.length) {
      this.cursor = null;
      this.rule.setAttribute("visibility", "hidden");
      this.readout.textContent = "\u00a0";
      return;
    }
    this.cursor = steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
    this.rule.setAttribute("x1", this.x(this.cursor));
    this.rule.setAttribute("x2", this.x(this.cursor));
    this.rule.setAttribute("visibility", "visible");
    const values = this.shown().flatMap((line) => {
      const point = line.points.find(([step]) => step === this.cursor);
      return point ? [`${line.label} ${short(point[1])}${point[2] ? ` \u00b1 ${short(point[2])}` : ""}`] : [];
    });
    this.readout.textContent = `step ${this.cursor}: ${values.join("; ")}`;
  }
}

const charts = JSON.parse(document.getElementById("curves").textContent);
charts.forEach((chart, number) => {
  chart.lines.forEach((line) => { line.color = `var(--c${line.color})`; line.dash = DASHES[line.dash % DASHES.length]; });
  new Chart(document.getElementById(`chart-${number}`), chart);
});
