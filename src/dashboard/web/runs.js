// The list of runs, and a run's curves.
import { get, runPath } from "./api.js";
import { Chart } from "./chart.js";
import { loadCharts } from "./load.js";
import { badge, count, el, fact, number, table, time } from "./dom.js";

const SECTIONS = { learning: "Learning", episodes: "Episodes", speed: "Speed", sandbox: "Sandbox", actors: "Actors", memory: "Memory" };
const percent = (value) => (typeof value === "number" ? `${(100 * value).toFixed(1)} %` : "–");
const name = (path) => (path ?? "–").split("/").slice(-2).join("/");
const heldOut = (run) => (run.summary ? `${percent(run.summary.before?.pass_at_1)} → ${percent(run.summary.after?.pass_at_1)}` : percent(run.eval));

export async function runsPage(main) {
  const list = el("div");
  const search = el("input", { type: "search", oninput: () => show() });
  const state = el("select", { onchange: () => show() }, ["all", "running", "finished", "stopped", "failed"].map((word) => el("option", {}, word)));
  let runs = [];
  const show = () => {
    const found = runs.filter((run) => run.name.includes(search.value) && (state.value === "all" || run.state === state.value));
    const rows = found.map((run) => [
      el("a", { href: `#/run/${encodeURIComponent(run.name)}` }, run.name), badge(run.state),
      run.planned ? `${run.steps} of ${run.planned}` : `${run.steps}`, number(run.reward), percent(run.pass_rate), heldOut(run), name(run.model), time(run.started_at),
    ]);
    const heads = [["Run"], ["State"], ["Steps", true], ["Reward", true], ["Pass rate", true], ["Held-out pass@1", true], ["Model"], ["Started"]];
    list.replaceChildren(rows.length ? el("div", { class: "card" }, table(heads, rows, "Runs")) : el("p", { class: "card" }, runs.length ? "No run is like that." : "There are no runs yet: start one with `wardian train`."));
  };
  const form = el("form", { onsubmit: (event) => event.preventDefault() }, el("label", {}, "Name contains", search), el("label", {}, "State", state));
  const cut = el("p", { class: "faint", role: "status" });
  main.replaceChildren(el("h1", {}, "Runs"), form, cut, list);
  const load = async () => {
    const found = await get("runs");
    const told = found.runs.sort((a, b) => (b.updated_at ?? 0) - (a.updated_at ?? 0));
    cut.textContent = found.is_cut_off ? `The folder has more: these are the ${count(told.length)} that changed last.` : "";
    if (JSON.stringify(told) === JSON.stringify(runs) && list.firstChild) return;
    runs = told;
    show();
  };
  await load();
  return load;
}

export function tabs(run, current) {
  const link = (where, words) => el("a", { href: `#/run/${encodeURIComponent(run)}${where}`, "aria-current": current === where ? "page" : null }, words);
  return el("nav", { class: "tabs", "aria-label": "Of this run" }, link("", "Curves"), link("/rollouts", "Rollouts"));
}

export async function runPage(main, run) {
  const facts = el("dl", { class: "facts" }), note = el("div"), curves = el("div"), file = el("pre");
  const machine = loadCharts(run);
  main.replaceChildren(el("h1", {}, run), note, facts, tabs(run, ""), curves, machine.node, el("details", { class: "card" }, el("summary", {}, "run.toml"), file));
  const { charts, intervals } = await get("charts");
  const series = new Map(), drawn = new Map();
  let place = { file: 0, offset: 0 }, every = 1, first = true;
  const add = (rows) => {
    for (const row of rows) for (const [key, value] of Object.entries(row)) {
      if (key === "step" || typeof value !== "number") continue;
      if (!series.has(key)) series.set(key, []);
      const ends = intervals.find(([metric]) => metric === key);
      series.get(key).push([row.step, value, ...(ends && Array.isArray(row[ends[1]]) ? [row[ends[1]]] : [])]);
    }
  };
  const matching = (patterns) => patterns.flatMap((pattern) => [...series.keys()].filter((key) => (pattern.endsWith("*") ? key.startsWith(pattern.slice(0, -1)) : key === pattern)));
  // Parts of a whole are drawn one upon the other, with what is left of it on top.
  const linesOf = (group) => {
    const lines = group.keys.map((key) => ({ name: key, points: series.get(key), isPart: Boolean(group.whole) && key !== group.whole }));
    const whole = lines.find((line) => line.name === group.whole), parts = lines.filter((line) => line.isPart);
    if (!whole || !parts.length) return lines;
    const taken = new Map();
    for (const [step, value] of parts.flatMap((line) => line.points)) taken.set(step, (taken.get(step) ?? 0) + value);
    lines.push({ name: "the rest", isPart: true, points: whole.points.map(([step, value]) => [step, Math.max(0, value - (taken.get(step) ?? 0))]) });
    return lines;
  };
  const draw = () => {
    const used = new Set();
    const groups = charts.map((chart) => ({ ...chart, keys: matching(chart.names) }));
    groups.forEach((group) => group.keys.forEach((key) => used.add(key)));
    for (const key of series.keys()) if (!used.has(key)) groups.push({ section: "others", title: key, keys: [key] });
    const sections = new Map();
    for (const group of groups.filter((group) => group.keys.length)) {
      if (!drawn.has(group.title)) drawn.set(group.title, new Chart(group.title));
      drawn.get(group.title).draw(linesOf(group));
      if (!sections.has(group.section)) sections.set(group.section, []);
      sections.get(group.section).push(drawn.get(group.title).node);
    }
    const shape = [...sections].map(([key, nodes]) => key + nodes.length).join();
    if (curves.dataset.shape === shape) return;
    curves.dataset.shape = shape;
    curves.replaceChildren(...[...sections].map(([key, nodes]) => el("section", { "aria-label": SECTIONS[key] ?? "More" }, el("h2", {}, SECTIONS[key] ?? "More"), el("div", { class: "grid" }, nodes))));
    if (!sections.size) curves.replaceChildren(el("p", { class: "card" }, "No step is done yet."));
  };
  const load = async () => {
    const told = await get(runPath(run)), about = told.run;
    facts.replaceChildren(fact("State", badge(about.state)), fact("Steps", about.planned ? `${about.steps} of ${about.planned}` : `${about.steps}`), fact("Reward", number(about.reward)), fact("Pass rate", percent(about.pass_rate)), fact("Held-out pass@1", heldOut(about)), fact("Model", name(about.model)), fact("Tasks", name(about.tasks)), fact("Started", time(about.started_at)), about.resumed_at ? fact("Resumed", time(about.resumed_at)) : "");
    note.replaceChildren(...(about.reason ? [el("p", { class: "card error" }, about.reason)] : []));
    file.textContent = told.run_toml ?? "";
    if (first) every = Math.max(1, Math.ceil(about.steps / 2000));
    let fresh = first;
    first = false;
    for (let more = true; more;) {
      const found = await get(`${runPath(run)}/metrics?file=${place.file}&offset=${place.offset}&every=${every}`);
      if (found.is_anew) series.clear();
      add(found.rows);
      fresh ||= found.is_anew || found.rows.length > 0;
      place = { file: found.file, offset: found.offset };
      more = found.has_more;
    }
    if (fresh) draw();
    await machine.load();
  };
  await load();
  return load;
}
