// Search in a document: for a text, piece by piece, or by what the model finds.

import { at, count, h, marked, placesOf, short } from "./dom.js";

export class Search {
  /** `find(text, start)` looks for a text, `ask(text)` asks the model; `go(block)` shows one, `marks(text, blocks)`. */
  constructor(find, ask, go, marks) {
    this.box = at("found");
    Object.assign(this, { find, ask, go, marks });
    this.close();
  }

  close() {
    this.turn = (this.turn ?? 0) + 1;
    this.matches = [];
    this.box.hidden = true;
    this.box.replaceChildren();
    this.marks("", []);
  }

  async text(query, start = 0) {
    if (start === 0) this.close();
    const turn = this.turn;
    const most = this.matches.length + 50;
    let [next, answer] = [start, null];
    while (next !== null && this.matches.length < most) {
      answer = await this.find(query, next);
      if (turn !== this.turn) return;
      this.matches.push(...answer.matches);
      next = answer.next;
      this.show(query, next, answer, next !== null && this.matches.length < most);
    }
  }

  async model(query) {
    this.close();
    const turn = this.turn;
    this.box.hidden = false;
    this.box.replaceChildren(h("h2", {}, "Search"), h("p", { class: "empty" }, "Asking the model …"));
    const answer = await this.ask(query).catch((error) => {
      if (turn === this.turn) this.close();
      throw error;
    });
    if (turn !== this.turn) return;
    this.matches = answer.matches;
    this.show("", null, answer, false);
  }

  show(query, next, answer, looking) {
    const found = this.matches.length;
    const part = next === null ? 1 : (next - answer.first) / Math.max(1, answer.stop - answer.first);
    const said = looking ? `${count(found)} so far, ${Math.floor(part * 100)}% searched`
      : next !== null ? `the first ${count(found)} blocks`
        : found ? `${count(found)} ${found === 1 ? "block" : "blocks"}` : "Nothing was found in this document.";
    this.box.hidden = false;
    this.box.replaceChildren(
      h("h2", {}, "Search"),
      h("p", { class: "facts", role: "status" }, said),
      h("ol", { class: "list" }, this.matches.map((each) => h("li", {},
        h("button", { type: "button", class: "hit", onclick: () => this.go(each.block) },
          h("span", { class: "where" }, h("b", {}, count(each.block)),
            each.score !== undefined && h("span", { class: "weight" }, short(each.score))),
          h("span", { class: "text" }, around(each.text, query)))))),
      ...(next !== null && !looking ? [h("button", { type: "button", onclick: () => this.text(query, next) }, "more")] : []),
    );
    this.marks(query, this.matches);
  }
}

/** The part of `text` around `query`, which is marked. */
function around(text, query) {
  const place = query ? text.toLowerCase().indexOf(query.toLowerCase()) : -1;
  const part = place > 60 ? `…${text.slice(place - 50)}` : text;
  return marked(part, placesOf(part, query));
}
