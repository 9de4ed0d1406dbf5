// The blocks that a token, or a whole trace, used: most weight first.

import { ink } from "./attention.js";
import { at, h, percent, short } from "./dom.js";

/** `go(document, block)` is called with the place that is clicked; `named` are the traces of weights, where two are shown. */
export function showUsed(title, answer, go, named = null) {
  const rows = answer.blocks.map((each) => {
    const weights = each.weights ?? [each.weight];
    const row = h(
      "button",
      { type: "button", class: "hit", disabled: each.document === null, onclick: () => go(each.document, each.block) },
      h("span", { class: "where" }, h("b", {}, h("bdi", {}, each.name), ` · ${each.block.toLocaleString("en")}`),
        weights.map((weight) => h("span", { class: "attention" }, weight === null ? "–" : percent(weight)))),
      h("span", { class: "facts" }, facts(each)),
      h("span", { class: "text" }, each.text ?? "no longer in the memory"),
    );
    row.style.setProperty("--share", ink(Math.max(...weights)));
    return h("li", {}, row);
  });
  const nothing = answer.kept === false
    ? "The blocks of this step were dropped, because the size of traces is limited."
    : "No block was retrieved here with this layer and head.";
  at("used").replaceChildren(h("h2", {}, title, named && h("span", { class: "attention" }, named.map((name) => `trace ${name}`).join(" / "))),
    rows.length ? h("ol", { class: "list" }, rows) : h("p", { class: "empty" }, nothing));
  at("used").hidden = false;
}

/** The blocks of two traces as one list, each with its weight in both, null where it was not used. */
export function together(one, other) {
  const found = new Map();
  for (const [place, used] of [one, other].entries()) {
    for (const each of used.blocks) {
      const key = `${each.name}\n${each.block}`;
      if (!found.has(key)) found.set(key, { ...each, weights: [null, null] });
      found.get(key).weights[place] = each.weight;
    }
  }
  const blocks = [...found.values()].map((each) => ({ ...each, weight: Math.max(...each.weights) }));
  return { blocks: blocks.sort((a, b) => b.weight - a.weight) };
}

function facts(each) {
  return [
    each.tier && `from ${each.tier}`,
    each.score !== undefined && each.score !== null && `score ${short(each.score)}`,
    each.layer !== undefined && `layer ${each.layer}`,
    each.offset !== undefined && each.offset !== null && `token ${each.offset} of it`,
  ].filter(Boolean).join(" · ");
}
