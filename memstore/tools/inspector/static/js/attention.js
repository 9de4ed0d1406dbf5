// Where attention went, drawn: a stacked bar for each token, and all layers, heads and steps at a glance.
//
// The scale is absolute. A bar is 100% of the attention high; a shade of amber is the root of the part that went to
// stored blocks, because a block that decides an answer may have 4% of it.

import { h, percent } from "./dom.js";

export const ELSEWHERE = { question: "the prompt", answer: "the answer so far", window: "the document's last tokens", sink: "the document's first tokens" };
const NAMED = 5; // blocks with a shade of their own
const BARS = 96; // pixels of 100%

/** What a part of attention is drawn with: between 0 and 1. */
export const ink = (share) => Math.sqrt(Math.max(0, Math.min(1, share)));

/** The parts of the steps' attention, each `{name, title, colour, of(step)}`, from the bottom of a bar to its top. */
export function parts(steps, names) {
  const total = new Map();
  for (const step of steps) {
    for (const [name, block, share] of step.blocks) {
      const key = `${name}\n${block}`;
      total.set(key, { name, block, share: (total.get(key)?.share ?? 0) + share });
    }
  }
  const used = [...total.values()].sort((one, other) => other.share - one.share);
  const several = used.some((each) => each.name !== used[0].name);
  const best = used.slice(0, NAMED);
  const found = best.map(({ name, block }, place) => ({
    name: several ? `${name} · ${block}` : `block ${block}`, title: `block ${block} of ${name}`, colour: `--block-${place + 1}`,
    of: (step) => step.blocks.find((each) => each[0] === name && each[1] === block)?.[2] ?? 0,
  }));
  const named = (step) => found.slice(0, best.length).reduce((sum, part) => sum + part.of(step), 0);
  if (total.size > best.length) {
    found.push({ name: `${total.size - best.length} more blocks`, title: "all other blocks that were retrieved", colour: "--block-more",
      of: (step) => Math.max(0, step.weight - named(step)) });
  }
  if (steps.some((step) => step.elsewhere)) {
    for (const [name, title] of Object.entries(ELSEWHERE)) {
      const place = names.indexOf(name);
      found.push({ name: name === "answer" ? "answer so far" : name, title, colour: `--${name}`, of: (step) => step.elsewhere?.[place] ?? 0 });
    }
  }
  const known = [...found];
  found.push({ name: "other", title: "attention to anything else, which was not recorded", colour: "--rest",
    of: (step) => (step.kept ? Math.max(0, 1 - known.reduce((sum, part) => sum + part.of(step), 0)) : 0) });
  return found;
}

/** What `found` says of one step, or of the mean of several. */
export function legend(found, steps) {
  const there = steps.filter((step) => step.kept);
  return h("ul", { class: "legend parts" }, found.map((part) => {
    const mean = there.reduce((sum, step) => sum + part.of(step), 0) / Math.max(1, there.length);
    return h("li", { title: part.title }, h("span", { class: "swatch", "--colour": `var(${part.colour})` }), h("span", { class: "name" }, part.name), h("b", {}, percent(mean)));
  }));
}

/** One stacked bar for each step; `column` pixels wide, the chosen one framed. */
export function drawBars(canvas, steps, found, chosen, column) {
  const pen = prepared(canvas, Math.max(1, steps.length * column), BARS + 2);
  const style = getComputedStyle(canvas);
  steps.forEach((step, place) => {
    let y = BARS + 1;
    for (const part of found) {
      const height = part.of(step) * BARS;
      pen.fillStyle = style.getPropertyValue(part.colour);
      pen.fillRect(place * column, y - height, column - (column > 3 ? 1 : 0), height);
      y -= height;
    }
  });
  pen.strokeStyle = style.getPropertyValue("--ink");
  const at = steps.findIndex((step) => step.number === chosen);
  if (at >= 0) pen.strokeRect(at * column - 0.5, 0.5, column, BARS + 1);
}

/** `rows` of parts of attention as shades, a cell `width` by `height` pixels. */
export function drawMap(canvas, rows, width, height, chosen = {}) {
  const columns = Math.max(1, ...rows.map((row) => row.length));
  const pen = prepared(canvas, columns * width, rows.length * height);
  const style = getComputedStyle(canvas);
  pen.fillStyle = style.getPropertyValue("--lit");
  rows.forEach((row, y) => row.forEach((share, x) => {
    pen.globalAlpha = ink(share);
    pen.fillRect(x * width, y * height, width - (width > 3 ? 1 : 0), height - (height > 3 ? 1 : 0));
  }));
  pen.globalAlpha = 1;
  pen.strokeStyle = style.getPropertyValue("--ink");
  if (chosen.row >= 0) pen.strokeRect(0.5, chosen.row * height - 0.5, columns * width - 1, height);
  if (chosen.column >= 0) pen.strokeRect(chosen.column * width - 0.5, 0.5, width, rows.length * height - 1);
}

/** Which cell of a canvas a mouse event is in. */
export function cellOf(event, width, height) {
  const { left, top } = event.currentTarget.getBoundingClientRect();
  return [Math.floor((event.clientX - left) / width), Math.floor((event.clientY - top) / height)];
}

function prepared(canvas, width, height) {
  const scale = devicePixelRatio;
  Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
}
