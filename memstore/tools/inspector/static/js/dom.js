// Elements without templates: what a document says becomes text nodes, so it can never become anything else.

/** An element with properties, attributes (`aria-*`, `role`, `for`), listeners (`onclick`) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Put `items` into a list; who had the focus within it keeps it: a list may change while its keys are used. */
export function fillList(list, items) {
  const name = document.activeElement?.dataset.focus;
  const had = name !== undefined && list.contains(document.activeElement);
  list.replaceChildren(...items);
  if (had) [...list.querySelectorAll("button")].find((button) => button.dataset.focus === name)?.focus({ preventScroll: true });
}

export const at = (id) => document.getElementById(id);

/** `1,234`. */
export const count = (number) => number.toLocaleString("en");

/** `1 token`, `2 tokens`. */
export const counted = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

/** Three digits that matter. */
export function short(number) {
  if (number === null || number === undefined) return "–";
  return Math.abs(number) >= 1000 ? count(Math.round(number)) : String(Number(number.toPrecision(3)));
}

/** A part of all attention, between 0 and 1. */
export function percent(part) {
  if (part > 0 && part < 0.001) return "<0.1%";
  return `${part >= 0.0995 ? Math.round(100 * part) : (100 * part).toFixed(1).replace(/\.0$/, "")}%`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number >= 100 || unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

/**
 * Where `part` stands in `text`, whatever its case, as `[begin, end]`; also where it begins in the text `before` or goes
 * on in the text `after`.
 */
export function placesOf(text, part, before = "", after = "") {
  if (!part) return [];
  const beyond = part.length - 1;
  const head = beyond ? before.slice(-beyond) : "";
  const whole = head + text + after.slice(0, beyond);
  const lower = whole.toLowerCase();
  if (lower.length !== whole.length) return []; // letters whose small form is longer: places would be wrong
  const found = [];
  let place = lower.indexOf(part.toLowerCase());
  while (place >= 0) {
    const begin = Math.max(found.at(-1)?.[1] ?? 0, place - head.length);
    const end = Math.min(text.length, place - head.length + part.length);
    if (begin < end) found.push([begin, end]);
    place = lower.indexOf(part.toLowerCase(), place + part.length);
  }
  return found;
}

/** `text` between `from` and `to` as nodes, with its `places` in <mark>s; see `placesOf`. */
export function marked(text, places, from = 0, to = text.length) {
  const nodes = [];
  for (const [begin, end] of places) {
    const [first, last] = [Math.max(begin, from), Math.min(end, to)];
    if (first >= last) continue;
    nodes.push(text.slice(from, first), h("mark", {}, text.slice(first, last)));
    from = last;
  }
  return [...nodes, text.slice(from, to)];
}
