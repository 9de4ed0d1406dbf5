// One block: its tokens, norms, landmark, nearest blocks, and the traces that retrieved it.

import { at, count, h, percent, short } from "./dom.js";

const REST = 150; // milliseconds that a block is looked at before everything is searched for its neighbours

export class Block {
  /** `get(path, parameters)` asks about the block; `go(block)` shows another, `open(trace, step)` a trace. */
  constructor(get, go, open) {
    Object.assign(this, { box: at("block"), get, go, open, layer: null });
    this.close();
  }

  close() {
    this.block = null;
    this.box.replaceChildren(h("p", { class: "empty" }, "Click a block to see its tokens, norms, landmark and neighbours."));
  }

  async show(block, memory) {
    this.block = block;
    this.memory = memory;
    this.layer ??= memory.index_layers[0] ?? 0;
    const asked = [block, this.layer];
    const stale = () => asked[0] !== this.block || asked[1] !== this.layer;
    const answer = await this.get("", { layer: this.layer }).catch((error) => {
      if (error.status === undefined) throw error;
      return { trouble: error.message };
    });
    if (stale()) return;
    if (answer.trouble) {
      this.box.replaceChildren(h("h2", {}, `Block ${count(block)}`), h("p", { class: "empty danger" }, answer.trouble));
      return;
    }
    const later = { near: h("div", {}), traces: h("div", {}) };
    this.box.replaceChildren(...this.parts(answer, later));
    await new Promise((rested) => setTimeout(rested, REST));
    if (stale()) return;
    if (answer.landmarks) {
      const near = await this.get("/neighbours", { layer: this.layer });
      if (stale()) return;
      later.near.replaceChildren(...this.near(near));
    }
    const traces = await this.get("/traces");
    if (!stale()) later.traces.replaceChildren(...this.traces(traces));
  }

  parts(answer, later) {
    const end = answer.first_token + answer.ids.length - 1;
    const [field, norms] = Object.entries(answer.token_norms)[0] ?? [null, []];
    return [
      h("h2", {}, `Block ${count(answer.block)}`),
      h("p", { class: "facts" }, `tokens ${count(answer.first_token)} to ${count(end)}`,
        answer.searchable ? "" : " · incomplete: only stock models find it before it is full"),
      h("h3", {}, "Tokens"),
      h("div", { class: "pieces" }, tokens(answer, norms)),
      field && h("p", { class: "facts" }, `grey: norm of ${field} in layer ${answer.layer}, from ${short(Math.min(...norms))} to ${short(Math.max(...norms))}`),
      h("h3", {}, "Norms"),
      this.norms(answer),
      ...(answer.landmarks ? [h("h3", {}, `Landmark in layer ${answer.layer}`), landmark(answer.landmarks),
        h("h3", {}, "Nearest blocks"), later.near] : [h("p", { class: "empty" }, `Layer ${answer.layer} has no landmarks.`)]),
      h("h3", {}, "Retrieved by"),
      later.traces,
    ].filter(Boolean);
  }

  norms(answer) {
    const names = [...new Set(answer.norms.flatMap(Object.keys))];
    const rows = answer.norms.map((layer, number) =>
      h("tr", { class: number === answer.layer ? "chosen" : "" },
        h("th", { scope: "row" }, h("button", { type: "button", "aria-label": `Layer ${number}`, onclick: () => this.choose(number) }, number)),
        names.map((name) => h("td", {}, layer[name] ? short(layer[name].mean) : "–",
          layer[name] && h("small", {}, ` ${short(layer[name].min)}–${short(layer[name].max)}`))),
        h("td", {}, this.memory.index_layers.includes(number) ? "yes" : "")));
    return h("div", { class: "norms" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "layer"),
        names.map((name) => h("th", { scope: "col" }, name)), h("th", { scope: "col" }, "landmark"))),
      h("tbody", {}, rows)));
  }

  choose(layer) {
    this.layer = layer;
    this.go(this.block);
  }

  near(answer) {
    if (!answer.neighbours.length) return [h("p", { class: "empty" }, "There is no other complete block to compare with.")];
    return [h("ol", { class: "list" }, answer.neighbours.map((each) => h("li", {},
      h("button", { type: "button", class: "hit", onclick: () => this.go(each.block) },
        h("span", { class: "where" }, h("b", {}, count(each.block)), h("span", { class: "weight" }, short(each.score))),
        h("span", { class: "text" }, each.text)))))];
  }

  traces(answer) {
    const said = answer.looked < answer.found ? ` of the latest ${count(answer.looked)}` : "";
    if (!answer.found) return [h("p", { class: "empty" }, "No traces yet: ", h("code", {}, "memstore ask MEMORY QUESTION --trace"))];
    if (!answer.traces.length) return [h("p", { class: "empty" }, `None${said} of the traces.`)];
    return [h("ul", { class: "list" }, answer.traces.map((each) => h("li", {},
      h("button", { type: "button", class: "hit", onclick: () => this.open(each.trace, each.best) },
        h("span", { class: "where" }, h("b", {}, `trace ${each.trace}`), h("span", { class: "attention" }, percent(each.weight))),
        h("span", { class: "facts" }, `in ${count(each.steps)} steps, most in step ${count(each.best)}`)))))];
  }
}

function tokens(answer, norms) {
  const [least, most] = [Math.min(...norms), Math.max(...norms)];
  return answer.pieces.map((piece, place) => {
    const norm = norms[place];
    const words = piece === "" ? "·" : piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
    const title = `id ${answer.ids[place]}${norm === undefined ? "" : `, norm ${short(norm)}`}`;
    return h("span", { class: "token", title, "--share": norm > least ? (norm - least) / (most - least) : 0 }, words);
  });
}

/** A landmark's numbers, a row for each vector: the stronger the colour, the farther from 0. */
function landmark(landmarks) {
  const rows = landmarks.shown;
  const [cell, height] = [Math.max(2, Math.floor(320 / landmarks.dim)), rows.length > 4 ? 6 : 14];
  const canvas = h("canvas", { class: "landmark", role: "img", width: cell * landmarks.dim, height: height * rows.length,
    "aria-label": `${landmarks.vectors} vectors of ${landmarks.dim} numbers` });
  const style = getComputedStyle(document.documentElement);
  const colours = [style.getPropertyValue("--minus"), style.getPropertyValue("--plus")];
  const most = Math.max(1e-9, ...rows.flat().map(Math.abs));
  const pen = canvas.getContext("2d");
  rows.forEach((row, y) => row.forEach((value, x) => {
    pen.fillStyle = colours[value < 0 ? 0 : 1];
    pen.globalAlpha = Math.abs(value) / most;
    pen.fillRect(x * cell, y * height, cell, height - 1);
  }));
  const kept = landmarks.vectors > rows.length ? `, ${rows.length} of them drawn` : "";
  return h("div", {}, canvas, h("p", { class: "facts" }, `${count(landmarks.vectors)} × ${landmarks.dim} numbers${kept}, norm ${short(landmarks.norms.mean)}`,
    landmarks.vectors > 1 ? ` (${short(landmarks.norms.min)}–${short(landmarks.norms.max)})` : "",
    ` · `, h("span", { class: "minus" }, "below 0"), " ", h("span", { class: "plus" }, "above 0")));
}
