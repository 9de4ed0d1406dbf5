// The blocks that a token, or a whole trace, used: most weight first.

import { ink } from "./attention.js";
import { at, count, h, percent, short } from "./dom.js";
import { lists } from "./tokens.js";

/**
 * `go(document, block, offset)` is called with the place that is clicked; `named` are the traces of weights, where two
 * are shown. Tokens that were chosen or missed are listed first: `unit` of them at a time, in blocks of `size`.
 */
export function showUsed(title, answer, go, named, unit, size) {
  const picks = lists(answer.blocks, unit, size, go);
  const rows = answer.blocks.filter((each) => each.weight !== null).map((each) => {
    const weights = each.weights ?? [each.weight];
    return h("li", {}, h(
      "button",
      { type: "button", class: "hit", disabled: each.document === null, "--share": ink(Math.max(...weights)), onclick: () => go(each.document, each.block) },
      h("span", { class: "where" }, h("b", {}, h("bdi", {}, each.name), ` · ${count(each.block)}`),
        weights.map((weight) => h("span", { class: "attention" }, weight === null ? "–" : percent(weight)))),
      h("span", { class: "facts" }, facts(each)),
      h("span", { class: "text" }, each.text?.replace(/^\ufffd+|\ufffd+$/g, "") ?? "no longer in the memory"),
    ));
  });
  const nothing = answer.kept === false
    ? "The blocks of this step were dropped, because the size of traces is limited."
    : "No block was retrieved here with this layer and head.";
  at("used").replaceChildren(h("h2", {}, title, named && h("span", { class: "attention" }, named.map((name) => `trace ${name}`).join(" / "))),
    ...picks, ...(picks.length && rows.length ? [h("h3", {}, "Their blocks")] : []),
    ...(answer.found > rows.length ? [h("p", { class: "facts" }, `Only ${count(rows.length)} of ${count(answer.found)} blocks are listed and marked: those with most attention.`)] : []),
    rows.length ? h("ol", { class: "list" }, rows) : h("p", { class: "empty" }, nothing));
  at("used").hidden = false;
}

/** The blocks of two traces as one list, each with its weight in both, null where it was not used. */
export function together(one, other) {
  const found = new Map();
  for (const [place, used] of [one, other].entries()) {
    for (const each of used.blocks) {
      const key = `${each.name}\n${each.block}`;
      if (!found.has(key)) found.set(key, { ...each, weights: [null, null], tokens: {} });
      const both = found.get(key);
      both.weights[place] = each.weight;
      if (each.weight !== null) both.weight = Math.max(both.weight, each.weight); // a block that one only missed has null
      if (each.pieces.length) both.pieces = each.pieces;
      for (const [offset, token] of Object.entries(each.tokens)) {
        const known = both.tokens[offset];
        both.tokens[offset] = (token.weight ?? -1) > (known?.weight ?? -1) ? { ...known, ...token } : { ...token, ...known };
      }
    }
  }
  const blocks = [...found.values()].sort((a, b) => b.weight - a.weight);
  const listed = (all) => all.filter((each) => each.weight !== null).length;
  return { blocks, found: listed(blocks) + Math.max(one.found - listed(one.blocks), other.found - listed(other.blocks)) }; // or more
}

function facts(each) {
  return [
    each.tier && `from ${each.tier}`,
    (each.score ?? null) !== null && `score ${short(each.score)}`,
    each.layer !== undefined && `layer ${each.layer}`,
    (each.offset ?? null) !== null && `token ${each.offset} of it`,
  ].filter(Boolean).join(" · ");
}
