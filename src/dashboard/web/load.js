// What a run takes of its machine: charts over time.
import { get, runPath } from "./api.js";
import { Chart } from "./chart.js";
import { el } from "./dom.js";

const MOST = 1000;
const CHARTS = [
  ["CPU of the machine, share", /^host\/cpu$/], ["Cores that the run's process used", /^process\/cores$/], ["Memory", /memory.*_bytes$/],
  ["Programs and gradings that ended, a second", /^sandbox\/per_second$/], ["Programs and gradings under way or waiting", /^sandbox\/under_way$/],
  ["Actors: in use, and episodes that wait for one", /^actor\//], ["GPUs, share of time that they computed", /^GPU \d+$/], ["Memory of GPUs", /^GPU .*bytes$/],
];
const clock = (seconds) => new Date(seconds * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });

function numbers(row) {
  const found = Object.entries(row).filter(([key, value]) => key !== "time" && typeof value === "number");
  for (const gpu of Array.isArray(row.gpus) ? row.gpus : []) {
    const name = `GPU ${Number(gpu.index)}`;
    for (const [key, value] of [[name, gpu.used], [`${name} memory_bytes`, gpu.memory_bytes], [`${name} memory_total_bytes`, gpu.memory_total_bytes]]) if (typeof value === "number") found.push([key, value]);
  }
  return found;
}

export function loadCharts(run) {
  const node = el("section", { "aria-label": "Machine" });
  const series = new Map(), drawn = new Map();
  let place = { file: 0, offset: 0 };
  const load = async () => {
    let fresh = false;
    for (let more = true; more;) {
      const found = await get(`${runPath(run)}/load?file=${place.file}&offset=${place.offset}`);
      if (found.is_anew) series.clear();
      for (const row of found.rows) for (const [key, value] of numbers(row)) {
        if (!series.has(key)) series.set(key, []);
        const points = series.get(key);
        points.push([row.time, value]);
        // Every second one goes, so that what is left still spans the whole run.
        if (points.length > 2 * MOST) series.set(key, points.filter((_, at) => at % 2));
      }
      fresh ||= found.rows.length > 0;
      place = { file: found.file, offset: found.offset };
      more = found.has_more;
    }
    if (!fresh) return;
    const nodes = [];
    for (const [title, pattern] of CHARTS) {
      const keys = [...series.keys()].filter((key) => pattern.test(key) && !(title === "Memory" && key.startsWith("GPU"))).sort();
      if (!keys.length) continue;
      if (!drawn.has(title)) drawn.set(title, new Chart(title, clock, "time"));
      drawn.get(title).draw(keys.map((key) => ({ name: key, points: series.get(key) })));
      nodes.push(drawn.get(title).node);
    }
    if (node.dataset.charts === `${nodes.length}`) return;
    node.dataset.charts = `${nodes.length}`;
    node.replaceChildren(el("h2", {}, "Machine"), el("div", { class: "grid" }, nodes));
  };
  return { node, load };
}
