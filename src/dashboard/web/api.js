// Questions to the server. The key stays in this tab.
import { el } from "./dom.js";

export async function ask(path) {
  const key = sessionStorage.getItem("key");
  const answer = await fetch(`/api/${path}`, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  const error = new Error(told.error?.message ?? `status ${answer.status}`);
  error.status = answer.status;
  throw error;
}
export const get = async (path) => (await ask(path)).json();
export const runPath = (run) => `runs/${encodeURIComponent(run)}`;

export function keyForm(again) {
  const field = el("input", { type: "password", autocomplete: "off", required: true });
  return el("form", { class: "card", onsubmit: (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", field.value);
    again();
  } }, el("label", {}, "Key of this dashboard", field), el("button", {}, "Open"));
}
