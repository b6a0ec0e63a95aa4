// Elements. Text is only ever set as text: what a model wrote cannot become markup.
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return made;
}
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
export function number(value, digits = 3) {
  if (typeof value !== "number") return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1);
  if (size >= 1e6) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(size >= 1000 ? 4 : digits)).toString();
}
// For axes, where there is room for a few letters.
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const brief = (value) => (Math.abs(value) >= 1e4 ? compact.format(value) : number(value));
export function bytes(value) {
  if (typeof value !== "number") return "–";
  const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
export const count = (value) => (typeof value === "number" ? value.toLocaleString("en") : "–");
export const time = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "–");
export const ENDINGS = { finished: "finished", truncated: "cut off", turn_limit: "out of turns", failed: "not scored" };
export const badge = (state, words) => el("span", { class: `badge ${/^[a-z_]+$/.test(state) ? state : ""}` }, words ?? state);
export const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
export function table(heads, rows, caption) {
  const cell = (kind, value, numeric) => el(kind, { class: numeric ? "n" : null, scope: kind === "th" ? "col" : null }, value);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, heads.map(([name, numeric]) => cell("th", name, numeric)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, at) => cell("td", value, heads[at][1])))))));
}
