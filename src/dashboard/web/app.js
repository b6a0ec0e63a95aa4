// Which page is shown, and its going on.
import { keyForm } from "./api.js";
import { el } from "./dom.js";
import { episodePage, rolloutsPage } from "./rollouts.js";
import { runPage, runsPage } from "./runs.js";

const EVERY = 3000;
const main = document.getElementById("main"), crumbs = document.getElementById("crumbs"), status = document.getElementById("status");
let turn = 0;

async function show() {
  const mine = ++turn;
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
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
    while (again) {
      await new Promise((done) => setTimeout(done, EVERY));
      if (mine !== turn) return;
      if (!document.hidden) await again();
    }
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) { main.replaceChildren(keyForm(show)); return; }
    main.prepend(el("p", { class: "card error", role: "alert" }, `${error.message} `, el("button", { type: "button", onclick: show }, "Try again")));
  }
}
addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  main.focus();
  show();
});
show();
