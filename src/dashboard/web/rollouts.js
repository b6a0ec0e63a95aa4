// Stored episodes: the list of a step, and one or two of them token by token.
import { ask, get, runPath } from "./api.js";
import { badge, count, el, ENDINGS, fact, number, table } from "./dom.js";
import { tabs } from "./runs.js";

const PAGE = 50;
const ending = (status) => badge(status.kind, ENDINGS[status.kind] ?? status.kind);
const link = (run, step, rows) => `#/run/${encodeURIComponent(run)}/rollouts/${step}/${rows.join("/")}`;

export async function rolloutsPage(main, run, step) {
  const { steps, is_cut_off } = await get(`${runPath(run)}/steps`);
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
      el("a", { href: link(run, chosen, [entry.row]) }, `${entry.task_id} · ${entry.sample}`), `${entry.group}`, ending(entry.status), number(entry.reward), number(entry.advantage), count(entry.turns), count(entry.sampled),
    ]);
    const heads = [["Task · sample"], ["Group", true], ["Ending"], ["Reward", true], ["Advantage", true], ["Turns", true], ["Sampled tokens", true]];
    const turn = (words, to, can) => el("button", { type: "button", disabled: !can, onclick: () => { from = to; load(); } }, words);
    const last = Math.min(from + PAGE, found.matching);
    const notes = [found.is_incomplete && "The file's end is cut off, or it has more than is listed.", found.broken > 0 && `${found.broken} rows are no episodes.`, found.no_advantages && `No advantages: ${found.no_advantages}.`].filter(Boolean);
    list.replaceChildren(...notes.map((note) => el("p", { class: "faint" }, note)), el("div", { class: "card" }, table(heads, rows, `Episodes of step ${chosen}`)),
      el("p", { class: "row" }, turn("Earlier", Math.max(0, from - PAGE), from > 0), turn("Later", from + PAGE, last < found.matching), el("span", { role: "status" }, found.matching ? `${from + 1} to ${last} of ${found.matching}` : "none is like that")));
  };
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); from = 0; load(); } }, el("label", {}, "Step", at), el("label", {}, "Ending", kind), el("label", {}, "Task contains", task), el("label", {}, "Reward from", min), el("label", {}, "to", max), el("button", {}, "Filter"));
  main.append(...(is_cut_off ? [el("p", { class: "faint" }, `There are more steps: these are the last ${count(steps.length)}.`)] : []), form, list);
  await load();
}

const RUN_ENDINGS = { out_of_fuel: "ran out of fuel", timed_out: "took too long", out_of_memory: "ran out of memory", killed: "was ended", trapped: "crashed in its sandbox" };

function stream(name, kept) {
  if (!kept) return null;
  const left = kept.left_out ? el("span", { class: "faint" }, `\n[${count(kept.left_out)} bytes are not stored]\n`) : null;
  return [el("div", { class: "faint" }, name), el("pre", {}, kept.head, left, kept.tail ?? "")];
}

// What a call ran: its own streams, before they were cut for the model.
function ranBlock(run) {
  const ending = run.ending.kind === "exited" ? `exit code ${run.ending.code}` : RUN_ENDINGS[run.ending.kind] ?? run.ending.kind;
  const words = [ending, run.fuel === undefined ? null : `fuel ${count(run.fuel)}`].filter(Boolean).join(" · ");
  const fine = run.ending.kind === "exited" && run.ending.code === 0;
  const streams = [stream("Standard output", run.stdout), stream("Standard error", run.stderr)].filter(Boolean);
  return el("details", { class: `ran ${fine ? "" : "unsound"}` }, el("summary", {}, `Ran: ${words}`), run.ending.reason ? el("p", { class: "faint" }, run.ending.reason) : null, streams.length ? streams : el("p", { class: "faint" }, "It printed nothing."));
}

function message(told, runs) {
  const parts = [el("h3", {}, told.role)];
  if (told.reasoning_content) parts.push(el("pre", { class: "faint" }, told.reasoning_content));
  if (told.content) parts.push(el("pre", { class: told.role === "tool" ? "result" : null }, told.content));
  (told.tool_calls ?? []).forEach((call, place) => {
    const { name, arguments: given } = call.function;
    const texts = given && typeof given === "object" ? Object.entries(given) : [["", given]];
    parts.push(el("div", { class: "call" }, el("b", {}, name), texts.map(([key, value]) => [el("div", { class: "faint" }, key), el("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1))]), runs.filter((run) => run.call === place).map(ranBlock)));
  });
  const tried = runs.filter((run) => run.call === undefined);
  if (tried.length) parts.push(el("div", { class: "call" }, el("b", {}, "The answer, with the visible tests"), tried.map(ranBlock)));
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
  const runsOf = new Map(episode.turns.map((turn) => [turn.message, turn.runs ?? []]));
  const ran = episode.turns.reduce((sum, turn) => sum + (turn.runs ?? []).length, 0);
  const folds = ran ? el("p", {}, el("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
    const open = event.currentTarget.getAttribute("aria-pressed") === "false";
    event.currentTarget.setAttribute("aria-pressed", `${open}`);
    node.querySelectorAll("details.ran").forEach((block) => { block.open = open; });
  } }, "Unfold what was run")) : null;
  const node = el("article", { class: "card" }, el("h2", {}, `Task ${episode.task_id}, sample ${episode.sample}`),
    el("dl", { class: "facts" }, fact("Ending", ending(episode.status)), fact("Reward", number(episode.reward)), fact("Advantage", number(told.advantage)), fact("Tool calls", `${calls}, ${failures} failed`), fact("Fuel", count(episode.usage.fuel)), fact("Seconds in tools", number(episode.usage.tool_seconds)), ...Object.entries(episode.rewards).map(([key, value]) => fact(key, number(value)))),
    episode.status.reason ? el("p", { class: "error" }, episode.status.reason) : null,
    told.no_advantage ? el("p", { class: "faint" }, `No advantage: ${told.no_advantage}.`) : null,
    el("button", { type: "button", onclick: keep }, "Download as JSON"), el("h2", {}, "Conversation"), folds, episode.messages.map((told, at) => message(told, runsOf.get(at) ?? [])), el("h2", {}, "Tokens"), tokens(told.tokens, told.advantage));
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
