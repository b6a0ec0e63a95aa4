// Which page is shown, and its going on.
import { keyForm } from "./api.js";
import { el } from "./dom.js";
import { episodePage, rolloutsPage } from "./rollouts.js";
import { runPage, runsPage } from "./runs.js";

const EVERY = 3000;
const main = document.getElementById("main"), crumbs = document.getElementById("crumbs"), status = document.getElementById("status");
let turn = 0;

// A name that was typed or cut may be no code of anything.
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

// One look that fails is no reason to look no more: it is said, and tried again after a longer while.
async function follow(again, mine) {
  let failed = 0, late;
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY * Math.min(10, 2 ** failed)));
    if (mine !== turn) return;
    if (document.hidden) continue;
    try {
      await again();
      failed = 0;
      late?.remove();
      late = null;
    } catch (error) {
      if (mine !== turn) return;
      if (error.status === 401) throw error;
      failed += 1;
      late?.remove();
      late = el("p", { class: "card error", role: "alert" }, `No news: ${error.message}. What is shown is of before; it is tried again.`);
      main.prepend(late);
    }
  }
}

async function show() {
  const mine = ++turn;
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
  const [, run, , step, row, other] = parts;
  const page = el("div");
  crumbs.replaceChildren(...(run ? [el("a", { href: "#/" }, "Runs"), " / ", el("a", { href: `#/run/${encodeURIComponent(run)}` }, run)] : []), ...(step !== undefined ? [" / ", el("a", { href: `#/run/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(step)}` }, `step ${step}`)] : []));
  document.title = run ? `${run} · Wardian` : "Runs · Wardian";
  try {
    let again;
    if (!run) again = await runsPage(page);
    else if (row !== undefined) await episodePage(page, run, step, row, other);
    else if (parts[2] === "rollouts") await rolloutsPage(page, run, step);
    else again = await runPage(page, run);
    if (mine !== turn) return;
    main.replaceChildren(page);
    status.textContent = `${document.title} is shown`;
    if (again) await follow(again, mine);
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) { main.replaceChildren(keyForm(show)); return; }
    main.replaceChildren(el("p", { class: "card error", role: "alert" }, `${error.message} `, el("button", { type: "button", onclick: show }, "Try again")));
  }
}
addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  main.focus();
  show();
});
show();
