// Line charts with a cursor for mouse and keyboard, and their numbers as a table.
import { brief, bytes, el, svg, number, table } from "./dom.js";

const WIDTH = 330, HEIGHT = 130;

export class Chart {
  // `place` says what a place on the axis of x is called, and `axis` names that axis in the table.
  constructor(title, place = (step) => `step ${step}`, axis = "step") {
    this.title = title;
    this.place = place;
    this.axis = axis;
    this.plot = svg("svg", { viewBox: "-44 -8 384 158", role: "img", tabindex: "0" });
    this.key = el("div", { class: "key" });
    this.numbers = el("details", { ontoggle: () => this.list() }, el("summary", {}, "Numbers"));
    this.node = el("figure", { class: "card" }, el("figcaption", {}, title), this.plot, this.key, this.numbers);
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.point(this.nearest(((event.clientX - box.left) / box.width) * 384 - 44));
    });
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (by === undefined || !this.steps?.length) return;
      event.preventDefault();
      const last = this.steps.length - 1;
      this.point(Math.max(0, Math.min(last, (this.at ?? (by < 0 ? last + 1 : -1)) + by)));
    });
  }

  // lines: [{ name, points: [[step, value, [low, high]?]] }]. Those with `isPart` are drawn one upon the other.
  draw(lines) {
    this.lines = lines;
    this.told = lines.every((line) => line.name.endsWith("bytes")) ? bytes : number;
    const all = lines.flatMap((line) => line.points);
    this.steps = [...new Set(all.map((point) => point[0]))].sort((a, b) => a - b);
    const tops = new Map();
    const bands = lines.filter((line) => line.isPart).map((line) => ({ line, points: line.points.map(([step, value]) => {
      const low = tops.get(step) ?? 0;
      tops.set(step, low + value);
      return [step, low, low + value];
    }) }));
    const values = all.flatMap((point) => [point[1], ...(point[2] ?? [])]).concat([...tops.values()], bands.length ? [0] : []);
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > 0 && low < 0.5 * high) low = 0;
    if (high - low < Math.max(1e-12, 1e-9 * Math.abs(high))) {
      const room = high === 0 ? 1 : 0.1 * Math.abs(high);
      low -= room; high += room;
    }
    const first = this.steps[0], last = this.steps.at(-1);
    this.x = (step) => (last > first ? ((step - first) / (last - first)) * WIDTH : WIDTH / 2);
    this.y = (value) => (1 - (value - low) / (high - low)) * HEIGHT;
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const value = low + share * (high - low), y = this.y(value);
      const label = svg("text", { x: -5, y: y + 3, "text-anchor": "end" });
      label.textContent = this.told === bytes ? bytes(value) : brief(value);
      parts.push(svg("line", { class: "axis", x1: 0, x2: WIDTH, y1: y, y2: y }), label);
    }
    for (const [x, anchor, words] of [[0, "start", this.place(first)], [WIDTH, "end", this.place(last)]]) {
      const label = svg("text", { x, y: HEIGHT + 15, "text-anchor": anchor });
      label.textContent = words;
      parts.push(label);
    }
    for (const { line, points } of bands) {
      const upper = points.map(([step, , high]) => `${this.x(step).toFixed(1)},${this.y(high).toFixed(1)}`);
      const lower = points.map(([step, low]) => `${this.x(step).toFixed(1)},${this.y(low).toFixed(1)}`).reverse();
      parts.push(svg("polygon", { class: `k${lines.indexOf(line) % 6}`, points: [...upper, ...lower].join(" ") }));
    }
    lines.forEach((line, at) => {
      if (line.isPart && line.points.length > 1) return;
      for (const [step, , ends] of line.points) {
        if (ends) parts.push(svg("line", { class: `k${at % 6}`, x1: this.x(step), x2: this.x(step), y1: this.y(ends[0]), y2: this.y(ends[1]) }));
      }
      const path = line.points.map(([step, value], index) => `${index ? "L" : "M"}${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`);
      parts.push(svg("path", { class: `k${at % 6}`, d: path.join("") }));
      if (line.points.length <= 12) {
        parts.push(...line.points.map(([step, value]) => svg("circle", { class: `k${at % 6}`, r: 2.2, cx: this.x(step), cy: this.y(value) })));
      }
    });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.plot.replaceChildren(...parts, this.cursor);
    const told = lines.map((line) => `${line.name} ${this.told(line.points.at(-1)[1])}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}, ${this.axis === "step" ? `steps ${first} to ${last}` : `${this.place(first)} to ${this.place(last)}`}. Last: ${told}. Arrow keys move over it.`);
    this.point(this.at ?? null);
    this.list();
  }

  nearest(x) {
    let best = null;
    this.steps?.forEach((step, at) => {
      if (best === null || Math.abs(this.x(step) - x) < Math.abs(this.x(this.steps[best]) - x)) best = at;
    });
    return best;
  }

  point(at) {
    this.at = at;
    if (!this.lines) return;
    const step = at === null ? null : this.steps[at];
    this.cursor.setAttribute("visibility", step === null || step === undefined ? "hidden" : "visible");
    if (step !== null && step !== undefined) { this.cursor.setAttribute("x1", this.x(step)); this.cursor.setAttribute("x2", this.x(step)); }
    const words = this.lines.map((line, index) => {
      const found = step === null ? line.points.at(-1) : line.points.findLast((point) => point[0] === step);
      return el("span", { class: `k${index % 6}` }, `${line.name} `, el("b", {}, found ? this.told(found[1]) : "–"));
    });
    this.key.replaceChildren(...words, ...(step === null || step === undefined ? [] : [`at ${this.place(step)}`]));
  }

  list() {
    if (!this.numbers.open || !this.lines) return;
    const of = this.lines.map((line) => new Map(line.points.map((point) => [point[0], point[1]])));
    const rows = this.steps.slice(-500).map((step) => [this.axis === "step" ? `${step}` : this.place(step), ...of.map((values) => (this.told === bytes ? bytes(values.get(step)) : number(values.get(step), 5)))]);
    const shown = table([[this.axis, true], ...this.lines.map((line) => [line.name, true])], rows, `Numbers of ${this.title}`);
    this.numbers.replaceChildren(this.numbers.firstChild, shown);
  }
}
