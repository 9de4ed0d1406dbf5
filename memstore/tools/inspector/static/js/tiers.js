// Where retrieved states came from, step by step, while a model is generating; and how large the memory is.

import { at, bytes, count, h, short } from "./dom.js";

const STEPS = 120; // steps drawn

/** `answer` is the trace on the page: its tiers, and its latest steps. */
export function showTiers(answer) {
  const box = at("tiers");
  box.hidden = !answer.trace;
  if (box.hidden) return;
  const { tiers } = answer.trace;
  const steps = answer.steps.slice(-STEPS);
  const totals = tiers.map((_, tier) => answer.steps.reduce((sum, step) => sum + step.tiers[tier], 0));
  const all = totals.reduce((sum, each) => sum + each, 0);
  const hits = totals[tiers.indexOf("device")] + totals[tiers.indexOf("host")];
  const fetched = hits + totals[tiers.indexOf("disk")];
  const legend = tiers.map((name, tier) => h("li", {}, h("span", { class: `swatch ${name}` }), name,
    h("b", {}, count(totals[tier]))));
  box.replaceChildren(
    h("h2", { id: "tiers-title" }, "Fetched from"),
    chart(steps, tiers),
    h("ul", { class: "legend" }, legend),
    h("dl", {},
      h("dt", { title: "Blocks that were retrieved in the step before are not fetched again" }, "fetched blocks found in memory"),
      h("dd", { id: "hits" }, fetched ? `${short((100 * hits) / fetched)}% of ${count(fetched)}` : all ? "none fetched" : "–"),
      h("dt", {}, "search, a step"), h("dd", {}, `${short(mean(steps, "search_us"))} µs`),
      h("dt", {}, "gather, a step"), h("dd", {}, `${short(mean(steps, "gather_us"))} µs`)),
  );
}

function chart(steps, tiers) {
  const most = Math.max(1, ...steps.map((step) => step.tiers.reduce((sum, each) => sum + each, 0)));
  const svg = drawn("svg", { viewBox: `0 0 ${STEPS} 40`, preserveAspectRatio: "none", role: "img", class: "chart",
    "aria-label": `Blocks retrieved in the last ${steps.length} steps, by tier; at most ${most} in a step` });
  steps.forEach((step, x) => {
    let y = 40;
    step.tiers.forEach((entries, tier) => {
      if (!entries) return;
      const height = (40 * entries) / most;
      y -= height;
      svg.append(drawn("rect", { x, y, width: 0.85, height, class: tiers[tier] }));
    });
  });
  return svg;
}

/** An element of a picture. */
function drawn(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function mean(steps, name) {
  const values = steps.map((step) => step[name]).filter((value) => value !== null);
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
}

export function showSizes(sizes) {
  const facts = [
    ["documents", count(sizes.documents)],
    ["tokens", count(sizes.tokens)],
    ["blocks", count(sizes.blocks)],
    ["states", bytes(sizes.bytes.blocks)],
    ["landmarks", bytes(sizes.bytes.landmarks)],
    ["on disk", bytes(sizes.disk_bytes)],
    ...(sizes.max_bytes === null ? [] : [["limit", `${bytes(sizes.used_bytes)} of ${bytes(sizes.max_bytes)}`]]),
  ];
  at("sizes").replaceChildren(h("h2", { id: "sizes-title" }, "Memory"),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}
