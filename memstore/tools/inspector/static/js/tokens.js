// Tokens that a model chose one by one, in the text of their blocks: which, with which scores, and where the attention
// then went; and those that an audit found missing.
//
// Marks differ by more than colour: chosen tokens have a solid line below, missed ones a dashed frame.

import { ink } from "./attention.js";
import { h, marked, percent, placesOf, short } from "./dom.js";

const AROUND = 8; // tokens before and after one in a list
const LISTED = 12; // tokens in a list

/**
 * The runs of tokens that were chosen or missed together in a used block, in order and apart:
 * `{number, from, to, chosen, missed, weight, score, layer, tokens}`. A model with a `unit` of several tokens chooses
 * these at once; of entries only the first token is known, so a chosen run, and a missed entry, go to the unit's end.
 * Tokens within it that an audit missed elsewhere belong to it.
 */
export function runs(block, unit, size) {
  const found = [];
  const begin = block.block * size;
  const offsets = Object.keys(block.tokens).map(Number).filter((offset) => offset < block.pieces.length).sort((one, other) => one - other);
  for (const offset of offsets) {
    const token = block.tokens[offset];
    const chosen = token.weight !== undefined;
    let run = found.at(-1);
    if (!run || offset > run.to) {
      const number = Math.floor((begin + offset) / unit);
      const end = chosen || token.entry ? Math.min(block.pieces.length, (number + 1) * unit - begin) - 1 : offset;
      run = { number, from: offset, to: end, chosen, missed: 0, weight: 0, tokens: {} };
      found.push(run);
    }
    run.chosen ||= chosen;
    run.missed += token.missed ?? 0;
    run.weight += token.weight ?? 0;
    if (run.layer === undefined || (token.score ?? -Infinity) > (run.score ?? -Infinity)) [run.score, run.layer] = [token.score, token.layer];
    run.tokens[offset] = token;
  }
  return found;
}

/** What a run says of itself; its score is unknown in a whole trace, and null if there was none. */
export function said(run, unit) {
  const cut = run.to - run.from + 1 < unit ? "part of " : ""; // it goes on in another block
  const thing = unit > 1 ? `${cut}${unit} tokens chosen together` : "chosen";
  return [
    run.chosen && `${thing}: attention ${percent(run.weight)}`,
    run.chosen && run.score === null && "no score: always seen, or another layer's choice",
    run.chosen && (run.score ?? null) !== null && `score ${short(run.score)} in layer ${run.layer}`,
    run.missed > 0 && `missed${run.chosen ? " in another layer, head or step" : " by the index"}: attention to everything would have given it ${percent(run.missed)}`,
  ].filter(Boolean).join("\n");
}

/** The text of a used block as nodes, its runs marked, and every place of the text `part` in a <mark>. */
export function text(block, found, unit, part, before, after) {
  const words = block.pieces.join("");
  const places = placesOf(words, part, before, after);
  const begins = [0];
  for (const piece of block.pieces) begins.push(begins.at(-1) + piece.length);
  const plain = (from, to) => marked(words, places, from, to);
  const nodes = [];
  let next = 0;
  for (const run of found) {
    nodes.push(...plain(begins[next], begins[run.from]));
    const inside = [];
    const alone = Object.values(run.tokens).filter((token) => token.weight !== undefined).length === 1;
    for (let offset = run.from; offset <= run.to; offset += 1) {
      const share = ink(alone ? run.weight : run.tokens[offset]?.weight ?? 0);
      const [begin, end] = [begins[offset], begins[offset + 1]];
      // Of an empty piece, the character ends with the next token.
      inside.push(h("span", { class: "piece", "--share": share }, begin === end ? "·" : plain(begin, end)));
    }
    const kind = [run.chosen && "picked", run.missed > 0 && "missed"].filter(Boolean).join(" ");
    nodes.push(h("span", { class: kind, title: said(run, unit), dataset: { offset: run.from } }, inside));
    next = run.to + 1;
  }
  nodes.push(...plain(begins[next], words.length));
  return nodes;
}

/** Lists of the runs of all used blocks: those with most attention, and the most missed ones. */
export function lists(blocks, unit, size, go) {
  const all = blocks.filter((block) => block.text !== null).flatMap((block) => runs(block, unit, size).map((run) => ({ block, run })));
  const chosen = all.filter(({ run }) => run.chosen).sort((one, other) => other.run.weight - one.run.weight);
  const missed = all.filter(({ run }) => run.missed > 0).sort((one, other) => other.run.missed - one.run.missed);
  const thing = unit > 1 ? `runs of ${unit} tokens` : "tokens";
  return [
    chosen.length && h("h3", {}, `Chosen ${thing}`),
    chosen.length && list(chosen, false, unit, go),
    missed.length && h("h3", {}, "Missed tokens, found by an audit"),
    missed.length && list(missed, true, unit, go),
  ].filter(Boolean);
}

function list(found, missing, unit, go) {
  return h("ol", { class: "list picks" }, found.slice(0, LISTED).map(({ block, run }) => {
    // Of a run of many tokens, the one with most attention.
    const at = Object.keys(run.tokens).map(Number).reduce((best, offset) =>
      ((run.tokens[offset].weight ?? 0) > (run.tokens[best].weight ?? 0) ? offset : best), run.from);
    const words = (from, to) => block.pieces.slice(Math.max(0, from), Math.max(0, to)).join("").replaceAll("\n", " ");
    const piece = block.pieces[at].replaceAll("\n", "⏎") || "·";
    const told = `“${piece}” in block ${block.block}: ${said(run, unit).replaceAll("\n", "; ")}`;
    return h("li", {}, h(
      "button",
      { type: "button", class: "hit", title: told, "aria-label": told, disabled: block.document === null, "--share": ink(missing ? 0 : run.weight), onclick: () => go(block.document, block.block, run.from) },
      h("span", { class: "snippet" }, words(at - AROUND, at),
        h("span", { class: missing ? "missed" : "picked" }, piece), words(at + 1, at + 1 + AROUND)),
      h("span", { class: "facts" }, !missing && (run.score ?? null) !== null && `score ${short(run.score)} `,
        h("span", { class: missing ? "missing" : "attention" }, percent(missing ? run.missed : run.weight))),
    ));
  }));
}
