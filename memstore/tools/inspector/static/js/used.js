// The blocks that a token, or a whole trace, used: most weight first.

import { at, h, short, weight } from "./dom.js";

/** `go(document, block)` is called with the place that is clicked. */
export function showUsed(title, answer, go) {
  const most = Math.max(1e-9, ...answer.blocks.map((each) => each.weight));
  const rows = answer.blocks.map((each) => {
    const row = h(
      "button",
      { type: "button", class: "hit", disabled: each.document === null, onclick: () => go(each.document, each.block) },
      h("span", { class: "where" }, h("b", {}, h("bdi", {}, each.name), ` · ${each.block.toLocaleString("en")}`),
        h("span", { class: "weight" }, weight(each.weight))),
      h("span", { class: "facts" }, facts(each)),
      h("span", { class: "text" }, each.text ?? "not in the memory any more"),
    );
    row.style.setProperty("--share", each.weight / most);
    return h("li", {}, row);
  });
  const nothing = answer.kept === false
    ? "What this step looked at had to leave: the traces of a memory are bounded."
    : "Nothing was retrieved here, with this layer and head.";
  at("used").replaceChildren(h("h2", {}, title), rows.length ? h("ol", { class: "list" }, rows) : h("p", { class: "empty" }, nothing));
  at("used").hidden = false;
}

function facts(each) {
  return [
    each.tier && `from ${each.tier}`,
    each.score !== undefined && each.score !== null && `score ${short(each.score)}`,
    each.layer !== undefined && `layer ${each.layer}`,
    each.offset !== undefined && each.offset !== null && `token ${each.offset} of it`,
  ].filter(Boolean).join(" · ");
}
