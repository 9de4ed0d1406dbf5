// What was generated, token by token; each can be clicked to light up the blocks that it used.

import { at, count, h, weight } from "./dom.js";

const WINDOW = 256; // steps shown at a time

export class Answer {
  /** `load(number, start, stop)` gives a part of a trace; `chosen()` is called when step, layer or head were chosen. */
  constructor(load, chosen) {
    this.box = at("answer");
    this.load = load;
    this.chosen = chosen;
    this.close();
  }

  close() {
    this.turn = (this.turn ?? 0) + 1; // what was asked for before is not shown any more
    Object.assign(this, { trace: null, steps: [], start: 0, step: null, layer: null, head: null, follow: false });
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
    const trace = await this.load(number, start, start + WINDOW);
    if (turn !== this.turn) return false;
    Object.assign(this, { trace, start, steps: trace.steps });
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
    const part = await this.load(number, from, start + WINDOW);
    if (turn !== this.turn) return;
    this.steps = [...(start === this.start ? this.steps.slice(0, from - start) : []), ...part.steps];
    this.start = start;
    this.trace = part;
    this.words();
    const latest = this.steps.at(-1)?.number ?? null;
    if (this.follow && latest !== null && latest !== this.step) this.choose(latest, true);
  }

  build() {
    const { trace } = this;
    const choice = (name, values, said) =>
      h("label", {}, `${said} `, h("select", { id: name, onchange: (event) => this.filter(name, event.target.value) },
        h("option", { value: "" }, "all"), values.map((value) => h("option", { value }, value))));
    const heads = Array.from({ length: trace.heads ?? 0 }, (_, head) => head);
    this.box.hidden = false;
    this.box.replaceChildren(
      h("div", { class: "bar" },
        h("h2", {}, `Trace ${trace.number}`),
        h("span", { class: "facts" }, [trace.mechanism, trace.top_k && `${trace.top_k} retrieved at a time`].filter(Boolean).join(" · ")),
        choice("layer", trace.layers, "layer"),
        choice("head", heads, "head"),
        h("label", { class: "follow" }, h("input", { type: "checkbox", id: "follow", checked: this.follow,
          onchange: (event) => (this.follow = event.target.checked) }), " follow"),
        h("button", { type: "button", class: "close", "aria-label": "Close the trace", onclick: () => this.chosen("close") }, "×")),
      h("p", { class: "question" }, trace.question),
      h("div", { class: "tokens", role: "listbox", "aria-label": "Generated tokens", tabIndex: 0,
        onclick: (event) => event.target.dataset.step && this.choose(Number(event.target.dataset.step)) }),
      h("div", { class: "more" }),
    );
    this.words();
  }

  words() {
    const tokens = this.steps.map((step) => {
      const token = h("span", { class: "token", role: "option", "aria-selected": step.number === this.step,
        title: `step ${step.number}: ${weight(step.weight)} of the attention went to what was retrieved` },
        step.piece === null ? "…" : step.piece === "" ? "·" : step.piece.replaceAll("\n", "⏎\n"));
      token.dataset.step = step.number;
      token.style.setProperty("--share", Math.min(1, step.weight));
      return token;
    });
    this.box.querySelector(".tokens").replaceChildren(...tokens);
    this.box.querySelector(".follow").hidden = this.trace.ended;
    const end = this.start + this.steps.length;
    const go = (start, said) => h("button", { type: "button", onclick: () => this.page(start) }, said);
    this.box.querySelector(".more").replaceChildren(...[
      this.start > 0 && go(Math.max(0, this.start - WINDOW), "earlier"),
      (this.start > 0 || end < this.trace.length) && ` steps ${count(this.start)} to ${count(end - 1)} of ${count(this.trace.length)} `,
      end < this.trace.length && go(end, "later"),
      !this.steps.length && "Nothing was generated yet.",
    ].filter(Boolean));
  }

  async page(start) {
    if (!(await this.fetch(this.trace.number, start))) return;
    this.follow = false;
    this.words();
  }

  filter(name, value) {
    this[name] = value === "" ? null : Number(value);
    this.chosen("filter");
  }

  choose(step, following = false) {
    if (!following) this.follow = false;
    const box = this.box.querySelector("#follow");
    if (box) box.checked = this.follow;
    this.step = step;
    for (const token of this.box.querySelectorAll(".token")) {
      const selected = Number(token.dataset.step) === step;
      token.setAttribute("aria-selected", selected);
      if (selected) token.scrollIntoView({ block: "nearest" });
    }
    return this.chosen("step");
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
