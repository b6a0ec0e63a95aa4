// Stored episodes: the list of a step, and one or two of them token by token.
import { ask, get, runPath } from "./api.js";
import { badge, el, ENDINGS, fact, number, table } from "./dom.js";
import { tabs } from "./runs.js";

const PAGE = 50;
const ending = (status) => badge(status.kind, ENDINGS[status.kind] ?? status.kind);
const link = (run, step, rows) => `#/run/${encodeURIComponent(run)}/rollouts/${step}/${rows.join("/")}`;

export async function rolloutsPage(main, run, step) {
  const { steps } = await get(`${runPath(run)}/steps`);
  main.replaceChildren(el("h1", {}, run), tabs(run, "/rollouts"));
  if (!steps.length) { main.append(el("p", { class: "card" }, "No step's episodes are stored yet.")); return; }
  const chosen = steps.includes(Number(step)) ? Number(step) : steps.at(-1);
  const at = el("select", { name: "step", onchange: () => { location.hash = `#/run/${encodeURIComponent(run)}/rollouts/${at.value}`; } }, steps.map((known) => el("option", { value: known, selected: known === chosen }, `${known}`)));
  const kind = el("select", {}, el("option", { value: "" }, "any"), Object.entries(ENDINGS).map(([key, words]) => el("option", { value: key }, words)));
  const task = el("input", { type: "search" }), min = el("input", { type: "number", step: "any" }), max = el("input", { type: "number", step: "any" });
  const list = el("div");
  let from = 0;
  const load = async () => {
    const query = new URLSearchParams({ from, limit: PAGE });
    for (const [key, field] of [["ending", kind], ["task", task], ["min_reward", min], ["max_reward", max]]) if (field.value) query.set(key, field.value);
    const found = await get(`${runPath(run)}/steps/${chosen}/episodes?${query}`);
    const rows = found.episodes.map((entry) => [
      el("a", { href: link(run, chosen, [entry.row]) }, `${entry.task_id} · ${entry.sample}`), `${entry.group}`, ending(entry.status), number(entry.reward), number(entry.advantage), `${entry.turns.length}`, `${entry.sampled}`,
    ]);
    const heads = [["Task · sample"], ["Group", true], ["Ending"], ["Reward", true], ["Advantage", true], ["Turns", true], ["Sampled tokens", true]];
    const turn = (words, to, can) => el("button", { type: "button", disabled: !can, onclick: () => { from = to; load(); } }, words);
    const last = Math.min(from + PAGE, found.matching);
    const notes = [found.is_incomplete && "The file's end is cut off, or it has more than is listed.", found.broken > 0 && `${found.broken} rows are no episodes.`, found.no_advantages && `No advantages: ${found.no_advantages}.`].filter(Boolean);
    list.replaceChildren(...notes.map((note) => el("p", { class: "faint" }, note)), el("div", { class: "card" }, table(heads, rows, `Episodes of step ${chosen}`)),
      el("p", { class: "row" }, turn("Earlier", Math.max(0, from - PAGE), from > 0), turn("Later", from + PAGE, last < found.matching), el("span", { role: "status" }, found.matching ? `${from + 1} to ${last} of ${found.matching}` : "none is like that")));
  };
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); from = 0; load(); } }, el("label", {}, "Step", at), el("label", {}, "Ending", kind), el("label", {}, "Task contains", task), el("label", {}, "Reward from", min), el("label", {}, "to", max), el("button", {}, "Filter"));
  main.append(form, list);
  await load();
}

function message(told) {
  const parts = [el("h3", {}, told.role)];
  if (told.reasoning_content) parts.push(el("pre", { class: "faint" }, told.reasoning_content));
  if (told.content) parts.push(el("pre", { class: told.role === "tool" ? "result" : null }, told.content));
  for (const call of told.tool_calls ?? []) {
    const { name, arguments: given } = call.function;
    const texts = given && typeof given === "object" ? Object.entries(given) : [["", given]];
    parts.push(el("div", { class: "call" }, el("b", {}, name), texts.map(([key, value]) => [el("div", { class: "faint" }, key), el("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1))])));
  }
  return el("div", { class: `message ${told.role}` }, parts);
}

function tokens(told, advantage) {
  const says = el("p", { class: "faint", "aria-live": "polite" }, "Select a token for its numbers; with the keyboard by the arrow keys.");
  const node = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens" });
  const paint = (by) => [...node.children].forEach((span, at) => {
    const hot = by === "logprob" ? Math.min(0.65, -told.logprobs[at] * 0.12) : Math.min(0.6, Math.abs(advantage ?? 0) * 0.3);
    const colour = by === "logprob" ? "hot" : (advantage ?? 0) > 0 ? "plus" : "minus";
    span.style.backgroundColor = told.mask[at] && hot > 0.01 && by !== "mask" ? `rgb(var(--${colour}) / ${hot})` : "";
  });
  told.texts.forEach((text, at) => node.append(el("span", { class: told.mask[at] ? "on" : "off" }, text)));
  let here = null;
  const select = (at) => {
    if (at < 0 || at >= told.ids.length) return;
    node.children[here]?.classList.remove("here");
    here = at;
    node.children[at].classList.add("here");
    node.children[at].scrollIntoView({ block: "nearest" });
    const chance = told.mask[at] ? ` · log-probability ${told.logprobs[at].toFixed(4)} (${(100 * Math.exp(told.logprobs[at])).toPrecision(3)} %) · advantage ${number(advantage)}` : "";
    says.textContent = `Token ${told.from + at}, id ${told.ids[at]} · ${told.mask[at] ? "sampled, in the loss" : told.from + at < told.prompt ? "prompt, not in the loss" : "observed, not in the loss"}${chance}`;
  };
  node.addEventListener("click", (event) => { const at = [...node.children].indexOf(event.target); if (at >= 0) select(at); });
  node.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); select((here ?? (by > 0 ? -1 : told.ids.length)) + by); }
  });
  const choose = [["logprob", "Log-probability"], ["advantage", "Advantage"], ["mask", "Loss mask"]].map(([key, words]) => el("button", { type: "button", "aria-pressed": `${key === "logprob"}`, onclick: (event) => {
    choose.forEach((button) => button.setAttribute("aria-pressed", `${button === event.currentTarget}`));
    paint(key);
  } }, words));
  paint("logprob");
  return el("div", {}, el("div", { class: "row", role: "group", "aria-label": "Colour by" }, choose), el("p", { class: "faint" }, "Underlined tokens were sampled and are in the loss.", told.has_text ? "" : " The run folder holds no tokenizer yet, so tokens are ids."), node, says,
    told.from + told.ids.length < told.total ? el("p", { class: "faint" }, `${told.total - told.from - told.ids.length} further tokens are in the download.`) : null);
}

async function side(run, step, row) {
  const path = `${runPath(run)}/steps/${step}/episodes/${row}`;
  const told = await get(path), episode = told.episode;
  const keep = async () => {
    const url = URL.createObjectURL(await (await ask(`${path}/raw`)).blob());
    el("a", { href: url, download: `episode-${step}-${row}.json` }).click();
    URL.revokeObjectURL(url);
  };
  const calls = episode.turns.reduce((sum, turn) => sum + turn.tool_calls, 0), failures = episode.turns.reduce((sum, turn) => sum + turn.tool_failures, 0);
  const node = el("article", { class: "card" }, el("h2", {}, `Task ${episode.task_id}, sample ${episode.sample}`),
    el("dl", { class: "facts" }, fact("Ending", ending(episode.status)), fact("Reward", number(episode.reward)), fact("Advantage", number(told.advantage)), fact("Tool calls", `${calls}, ${failures} failed`), fact("Fuel", number(episode.usage.fuel)), fact("Seconds in tools", number(episode.usage.tool_seconds)), ...Object.entries(episode.rewards).map(([key, value]) => fact(key, number(value)))),
    episode.status.reason ? el("p", { class: "error" }, episode.status.reason) : null,
    told.no_advantage ? el("p", { class: "faint" }, `No advantage: ${told.no_advantage}.`) : null,
    el("button", { type: "button", onclick: keep }, "Download as JSON"), el("h2", {}, "Conversation"), episode.messages.map(message), el("h2", {}, "Tokens"), tokens(told.tokens, told.advantage));
  return { node, told };
}

export async function episodePage(main, run, step, row, other) {
  const rows = other === undefined ? [row] : [row, other];
  const sides = await Promise.all(rows.map((one) => side(run, step, one)));
  const group = sides[0].told.group_rows;
  const choose = el("select", { onchange: () => { location.hash = link(run, step, choose.value ? [row, choose.value] : [row]); } }, el("option", { value: "" }, "nothing"),
    group.filter((entry) => `${entry.row}` !== row).map((entry) => el("option", { value: entry.row, selected: `${entry.row}` === other }, `sample ${entry.sample}: reward ${number(entry.reward)}`)));
  main.replaceChildren(el("h1", {}, `Step ${step}`), el("form", {}, el("label", {}, "Beside it, of the same group", choose)), el("div", { class: "sides" }, sides.map((one) => one.node)));
}
