// One trace: its overview, a stacked bar for each token, and the tokens, each of which can be chosen.

import { cellOf, drawBars, drawMap, ink, legend, parts } from "./attention.js";
import { count, h, percent } from "./dom.js";

const WINDOW = 256; // steps shown at a time
const MOST = 26; // pixels of a step
const HEAD = 9; // and of a head

export class Answer {
  /**
   * `load(number, start, stop, layer, head)` gives a part of a trace, `look(number, start, stop)` its overview;
   * `chosen(what)` is called when a step, a layer, a head or the end of it was chosen, also by following the trace.
   */
  constructor(box, load, look, chosen) {
    Object.assign(this, { box, load, look, chosen });
    this.close();
    new ResizeObserver(() => this.trace && this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.trace && this.draw());
  }

  close() {
    this.turn = (this.turn ?? 0) + 1; // what was asked for before is not shown any more
    Object.assign(this, { trace: null, overview: null, steps: [], start: 0, step: null, layer: null, head: null, follow: false });
    this.box.hidden = true;
    this.box.replaceChildren();
  }

  /** Show a trace, with `step` chosen if it is a number. A trace that goes on is followed. */
  async open(number, step = null) {
    this.close();
    const start = step === null ? 0 : Math.max(0, step - WINDOW / 2);
    if (!(await this.fetch(number, start))) return;
    this.follow = !this.trace.ended && step === null;
    this.build();
    if (step !== null) await this.choose(step);
    else if (this.follow) await this.choose(this.steps.at(-1)?.number ?? null, true);
  }

  /** Whether the part of the trace is here: not if another was asked for meanwhile. */
  async fetch(number, start) {
    const turn = (this.turn += 1);
    const [trace, overview] = await Promise.all([
      this.load(number, start, start + WINDOW, this.layer, this.head), this.look(number, start, start + WINDOW)]);
    if (turn !== this.turn) return false;
    Object.assign(this, { trace, overview, start, steps: trace.steps });
    return true;
  }

  /** Steps that have come since; `length` is how many there are now. */
  async update(length, ended) {
    if (!this.trace || (length === this.trace.length && ended === this.trace.ended)) return;
    const number = this.trace.number;
    const start = this.follow && length > this.start + WINDOW ? length - WINDOW / 2 : this.start;
    const known = start === this.start ? this.steps.findIndex((step) => step.token === null) : 0;
    const from = start + (known >= 0 ? known : this.steps.length);
    const turn = this.turn;
    const [part, overview] = await Promise.all([
      this.load(number, from, start + WINDOW, this.layer, this.head), this.look(number, start, start + WINDOW)]);
    if (turn !== this.turn) return;
    this.steps = [...(start === this.start ? this.steps.slice(0, from - start) : []), ...part.steps];
    Object.assign(this, { start, trace: part, overview });
    this.words();
    const latest = this.steps.at(-1)?.number ?? null;
    if (this.follow && latest !== null && latest !== this.step) this.choose(latest, true);
  }

  build() {
    const { trace } = this;
    const heads = Array.from({ length: trace.heads ?? 0 }, (_, head) => head);
    this.box.hidden = false;
    this.box.replaceChildren(
      h("div", { class: "bar" },
        h("h2", {}, `Trace ${trace.number}`),
        h("span", { class: "facts" }, [trace.mechanism, trace.top_k && `${trace.top_k} retrieved at a time`].filter(Boolean).join(" · ")),
        this.choice("layer", trace.layers),
        this.choice("head", heads),
        h("label", { class: "follow" }, h("input", { type: "checkbox", checked: this.follow,
          onchange: (event) => (this.follow = event.target.checked) }), " follow"),
        h("button", { type: "button", class: "close", "aria-label": "Close the trace", onclick: () => this.chosen("close") }, "×")),
      h("p", { class: "question" }, trace.question),
      h("div", { class: "maps" },
        h("figure", { class: "steps" },
          h("canvas", { class: "map", role: "img", onclick: (event) => this.map(event), onmousemove: (event) => this.tellMap(event) }),
          h("figcaption", {}),
          h("canvas", { class: "bars", role: "img", onclick: (event) => this.bar(event), onmousemove: (event) => this.tellBar(event) })),
        h("figure", { class: "heads" },
          h("canvas", { class: "map", role: "img", onclick: (event) => this.headMap(event), onmousemove: (event) => this.tellHead(event) }),
          h("figcaption", {}))),
      h("div", { class: "where" }),
      h("div", { class: "tokens", role: "listbox", "aria-label": "Generated tokens", tabIndex: 0,
        onclick: (event) => event.target.dataset.step && this.choose(Number(event.target.dataset.step)) }),
      h("div", { class: "more" }),
    );
    this.words();
  }

  choice(name, values) {
    return h("label", {}, `${name} `, h("select", { class: name, onchange: (event) => this.filter({ [name]: event.target.value }) },
      h("option", { value: "" }, "all"), values.map((value) => h("option", { value }, value))));
  }

  words() {
    this.parts = parts(this.steps, this.trace.elsewhere);
    const tokens = this.steps.map((step) => h(
      "span",
      { class: "token", role: "option", "aria-selected": step.number === this.step, title: this.told(step), dataset: { step: step.number }, "--share": ink(step.weight) },
      step.piece === null ? "…" : step.piece === "" ? "·" : step.piece.replaceAll("\n", "⏎\n"),
    ));
    this.box.querySelector(".tokens").replaceChildren(...tokens);
    this.box.querySelector(".follow").hidden = this.trace.ended;
    const end = this.start + this.steps.length;
    const go = (start, said) => h("button", { type: "button", onclick: () => this.page(start) }, said);
    this.box.querySelector(".more").replaceChildren(...[
      this.start > 0 && go(Math.max(0, this.start - WINDOW), "earlier"),
      (this.start > 0 || end < this.trace.length) && ` steps ${count(this.start)} to ${count(end - 1)} of ${count(this.trace.length)} `,
      end < this.trace.length && go(end, "later"),
      !this.steps.length && "No token was generated yet.",
    ].filter(Boolean));
    this.draw();
  }

  /** Where the attention of a step went, in words. */
  told(step) {
    if (!step.kept) return `step ${step.number}: no block was recorded or retrieved`;
    const said = this.parts.map((part) => [part, part.of(step)]).filter(([, share]) => share >= 0.0005);
    return `step ${step.number}: ${percent(step.weight)} of the attention went to blocks\n${said.map(([part, share]) => `${part.name} ${percent(share)}`).join("\n")}`;
  }

  draw() {
    const { overview, steps } = this;
    const wide = this.box.querySelector(".steps").clientWidth;
    if (!wide) return; // on a tab that is not shown
    this.column = Math.max(1, Math.min(MOST, Math.floor(wide / Math.max(1, steps.length))));
    this.row = Math.max(2, Math.min(9, Math.floor(80 / Math.max(1, overview.layers.length))));
    const row = overview.layers.indexOf(this.layer);
    const column = steps.findIndex((step) => step.number === this.step);
    const [map, headMap] = this.box.querySelectorAll(".map");
    const columns = steps.map((_, place) => overview.by_step[place] ?? []);
    drawMap(map, overview.layers.map((_, layer) => columns.map((each) => each[layer] ?? 0)), this.column, this.row, { row, column });
    drawMap(headMap, overview.by_head, HEAD, this.row, { row, column: this.head ?? -1 });
    drawBars(this.box.querySelector(".bars"), steps, this.parts, this.step, this.column);
    const { layers } = overview;
    const from = layers.length > 1 ? `layers ${layers[0]} to ${layers.at(-1)}` : layers.length ? `layer ${layers[0]}` : "no layers";
    const [above, aside] = this.box.querySelectorAll("figcaption");
    above.textContent = `Attention to blocks, ${from}; below, all attention by part, 0 to 100%`;
    aside.textContent = "by heads";
    map.setAttribute("aria-label", `Attention to stored blocks in ${from}, by tokens`);
    headMap.setAttribute("aria-label", `Attention to stored blocks in ${from}, by heads`);
    this.box.querySelector(".bars").setAttribute("aria-label", "Where the attention of each token went; the tokens below say it in words");
    const chosen = steps.filter((step) => step.number === this.step);
    this.box.querySelector(".where").replaceChildren(legend(this.parts, chosen.length ? chosen : steps),
      h("p", { class: "facts" }, chosen.length ? `of step ${count(this.step)}` : `mean of ${count(steps.length)} tokens`, scale()));
  }

  map(event) {
    const [x, y] = cellOf(event, this.column, this.row);
    if (!this.steps[x]) return;
    this.step = this.steps[x].number;
    this.follow = false;
    this.filter({ layer: this.overview.layers[y] ?? "" });
  }

  tellMap(event) {
    const [x, y] = cellOf(event, this.column, this.row);
    const share = this.overview.by_step[x]?.[y];
    event.currentTarget.title = share === undefined ? "" : `layer ${this.overview.layers[y]}, step ${this.steps[x]?.number}: ${percent(share)} to blocks`;
  }

  headMap(event) {
    const [x, y] = cellOf(event, HEAD, this.row);
    if (this.overview.by_head[y]?.[x] !== undefined) this.filter({ layer: this.overview.layers[y], head: x });
  }

  tellHead(event) {
    const [x, y] = cellOf(event, HEAD, this.row);
    const share = this.overview.by_head[y]?.[x];
    event.currentTarget.title = share === undefined ? "" : `layer ${this.overview.layers[y]}, head ${x}: ${percent(share)} to blocks`;
  }

  bar(event) {
    const [x] = cellOf(event, this.column, 1);
    if (this.steps[x]) this.choose(this.steps[x].number);
  }

  tellBar(event) {
    const step = this.steps[cellOf(event, this.column, 1)[0]];
    event.currentTarget.title = step ? `${step.piece ?? ""}\n${this.told(step)}` : "";
  }

  async page(start) {
    if (!(await this.fetch(this.trace.number, start))) return;
    this.follow = false;
    this.words();
  }

  /** Show one layer, one head, or with "" the mean of all. */
  async filter(wanted) {
    for (const [name, value] of Object.entries(wanted)) {
      this[name] = value === "" ? null : Number(value);
      this.box.querySelector(`select.${name}`).value = value;
    }
    if (!(await this.fetch(this.trace.number, this.start))) return;
    this.words();
    this.chosen("filter");
  }

  choose(step, following = false) {
    if (!following) this.follow = false;
    const box = this.box.querySelector(".follow input");
    if (box) box.checked = this.follow;
    this.step = step;
    for (const token of this.box.querySelectorAll(".token")) {
      const selected = Number(token.dataset.step) === step;
      token.setAttribute("aria-selected", selected);
      if (selected) token.scrollIntoView({ block: "nearest" });
    }
    this.draw();
    return this.chosen(following ? "following" : "step");
  }

  /** The token before or after the chosen one. */
  move(by) {
    const numbers = this.steps.map((step) => step.number);
    if (!numbers.length) return;
    const place = numbers.indexOf(this.step);
    this.choose(numbers[place < 0 ? 0 : Math.max(0, Math.min(numbers.length - 1, place + by))]);
  }

  piece() {
    return this.steps.find((step) => step.number === this.step)?.piece ?? "";
  }
}

/** What the shades mean. */
function scale() {
  const swatches = [0.001, 0.01, 0.1, 1].map((share) => h("span", {}, h("span", { class: "swatch", "--share": ink(share) }), percent(share)));
  return h("span", { class: "scale", title: "Shades of amber: the share of all attention" }, swatches);
}
