// The text of a document, laid out by blocks. Only the blocks in view, and a few around them, are in the page.
//
// Rows have any height, and a document can have more of them than a browser can give height to. So nothing is scrolled
// by the browser: rows from `from` to before `to` lie below each other, moved up by `offset` pixels, and rows are added
// and removed at both ends as that changes.

import { ink } from "./attention.js";
import { h, marked, percent, placesOf } from "./dom.js";
import { runs, text as textOf } from "./tokens.js";

const AROUND = 400; // pixels of rows kept above and below the view

export class Flow {
  /** `pages` gives blocks; `chosen(block)` is called when one is clicked, `moved(place)` when the view has moved. */
  constructor(box, chosen, moved) {
    Object.assign(this, { box, rows: box.querySelector(".rows"), chosen, moved });
    Object.assign(this, { lit: new Map(), picked: new Map(), unit: 1, size: 1, marks: "" });
    this.clear();
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    box.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.steady(() => {})).observe(box);
  }

  clear() {
    this.rows.replaceChildren();
    Object.assign(this, { pages: null, first: 0, stop: 0, from: 0, to: 0, offset: 0, selected: null, anchor: null, pointed: null });
  }

  /** Show blocks `first` to before `stop`, from `block` on. */
  show(pages, first, stop, block = first) {
    this.clear();
    Object.assign(this, { pages, first, stop });
    this.goTo(block);
  }

  /** The document has grown, or lost its oldest blocks, or was cut. */
  resize(first, stop) {
    if (first === this.first && stop === this.stop) return;
    for (const end of [this.stop - 1, stop - 1]) this.pages.drop(end); // it may have been incomplete
    const stale = this.row(this.stop - 1);
    Object.assign(this, { first, stop });
    if (this.from < first || this.to > stop) this.goTo(Math.min(Math.max(this.from, first), stop - 1), 0);
    else this.steady(() => stale && delete stale.dataset.here);
  }

  /** Bring a block into view, `part` of the height below its top. */
  goTo(block, part = 0.3) {
    block = Math.max(this.first, Math.min(block, this.stop - 1));
    this.anchor = block;
    const row = this.row(block);
    if (row) {
      this.offset = row.offsetTop - part * this.box.clientHeight;
    } else {
      this.rows.replaceChildren();
      this.from = this.to = block;
      this.offset = 0;
      this.fill();
      this.offset = (this.row(block)?.offsetTop ?? 0) - part * this.box.clientHeight;
    }
    this.fill();
  }

  /** Bring a block into view if it is not. */
  reveal(block) {
    const row = this.row(block);
    const top = row ? row.offsetTop - this.offset : -1;
    if (!row || top < 0 || top + row.offsetHeight > this.box.clientHeight) this.goTo(block);
  }

  scrollBy(pixels) {
    this.anchor = null;
    this.offset += pixels;
    this.fill();
  }

  /**
   * Weights by block, to be shown; and by block what was used of it, if tokens were chosen or missed: `unit` of them at
   * a time, in blocks of `size`.
   */
  light(lit, picked = new Map(), unit = 1, size = 1) {
    const changed = [...this.rows.children].filter((row) => [this.picked, picked].some((each) => each.has(Number(row.dataset.block))));
    Object.assign(this, { lit, picked, unit, size, pointed: null });
    if (changed.length) this.steady(() => changed.forEach((row) => delete row.dataset.here));
    for (const row of this.rows.children) this.tint(row);
  }

  /** Frame a chosen token of a block, as soon as its text is here. */
  point(block, offset) {
    this.pointed = { block, offset };
    for (const row of this.rows.children) this.frame(row);
  }

  frame(row) {
    for (const each of row.querySelectorAll("[data-offset]")) {
      each.classList.toggle("pointed", Number(row.dataset.block) === this.pointed?.block && Number(each.dataset.offset) === this.pointed.offset);
    }
  }

  /** A text that is marked wherever it stands. */
  mark(text) {
    this.marks = text;
    this.steady(() => {
      for (const row of this.rows.children) delete row.dataset.here;
    });
  }

  select(block) {
    this.selected = block;
    for (const row of this.rows.children) this.tint(row);
  }

  /** Rows whose blocks have arrived get their text; what is in view stays where it is. */
  steady(change) {
    const seen = this.row(this.anchor) ?? this.top();
    const before = seen ? seen.offsetTop - this.offset : 0;
    change();
    for (const row of this.rows.children) this.write(row);
    if (seen?.isConnected) this.offset = seen.offsetTop - before;
    this.fill();
  }

  /** The first row in view. */
  top() {
    for (const row of this.rows.children) {
      if (row.offsetTop + row.offsetHeight > this.offset) return row;
    }
    return null;
  }

  row(block) {
    return block !== null && block >= this.from && block < this.to ? this.rows.children[block - this.from] : undefined;
  }

  fill() {
    if (!this.pages || this.stop <= this.first) return;
    const height = this.box.clientHeight;
    for (let turn = 0; turn < 2; turn += 1) {
      while (this.offset < AROUND && this.from > this.first) {
        this.rows.prepend(this.make((this.from -= 1)));
        this.offset += this.rows.firstChild.offsetHeight;
      }
      while (this.rows.offsetHeight - this.offset < height + AROUND && this.to < this.stop) {
        this.rows.append(this.make(this.to));
        this.to += 1;
      }
      // At the ends: no further than the text goes.
      this.offset = Math.max(0, Math.min(this.offset, this.rows.offsetHeight - height));
    }
    this.trim(height);
    this.rows.style.transform = `translateY(${-Math.round(this.offset)}px)`;
    this.pages.want(this.from, this.to);
    this.moved(this.place());
  }

  trim(height) {
    for (let row = this.rows.firstChild; this.to - this.from > 1; row = this.rows.firstChild) {
      if (row.offsetHeight > this.offset - AROUND) break;
      this.offset -= row.offsetHeight;
      this.from += 1;
      row.remove();
    }
    while (this.to - this.from > 1 && this.rows.lastChild.offsetTop > this.offset + height + AROUND) {
      this.to -= 1;
      this.rows.lastChild.remove();
    }
  }

  /** Which part of the document is in view, in blocks. */
  place() {
    const top = this.top();
    if (!top) return { top: this.first, bottom: this.first };
    const begin = Number(top.dataset.block) + (this.offset - top.offsetTop) / top.offsetHeight;
    let bottom = begin;
    for (const row of this.rows.children) {
      if (row.offsetTop < this.offset + this.box.clientHeight) bottom = Number(row.dataset.block) + 1;
    }
    return { top: begin, bottom };
  }

  make(block) {
    const row = h(
      "div",
      { class: "row", role: "option", id: `row-${block}`, dataset: { block } },
      h("span", { class: "gutter" }, h("b", {}, block.toLocaleString("en")), h("i")),
      h("span", { class: "text waiting", dir: "ltr" }),
    );
    this.write(row);
    this.tint(row);
    return row;
  }

  write(row) {
    const block = this.pages.get(Number(row.dataset.block));
    if (!block || row.dataset.here) return;
    row.dataset.here = "yes";
    const text = row.lastChild;
    text.className = block.dropped ? "text dropped" : "text";
    if (block.dropped) text.replaceChildren("a repair removed this block, because it was damaged");
    else text.replaceChildren(...this.words(block));
    row.classList.toggle("by-token", !block.dropped && this.same(block)); // else the row has the shade
    this.frame(row);
  }

  /** Whether the text of a block whose tokens were chosen still is the same. */
  same(block) {
    return this.picked.get(block.block)?.pieces.join("") === block.text;
  }

  /** The text of a block; where its tokens were chosen, they are marked. */
  words(block) {
    const used = this.picked.get(block.block);
    const around = this.around(block.block);
    if (!this.same(block)) return marked(block.text, placesOf(block.text, this.marks, ...around));
    return textOf(used, runs(used, this.unit, this.size), this.unit, this.marks, ...around);
  }

  /** The texts before and after a block, as far as they are here. */
  around(block) {
    return [block - 1, block + 1].map((each) => this.pages.get(each)?.text ?? "");
  }

  tint(row) {
    const block = Number(row.dataset.block);
    const share = this.lit.get(block);
    row.classList.toggle("lit", share !== undefined);
    row.style.setProperty("--share", ink(share ?? 0));
    row.querySelector("i").textContent = share === undefined ? "" : percent(share);
    const selected = block === this.selected;
    row.classList.toggle("selected", selected);
    row.setAttribute("aria-selected", selected);
    if (selected) this.box.setAttribute("aria-activedescendant", row.id);
  }

  wheel(event) {
    if (event.ctrlKey) return; // the browser's zoom
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 20 : event.deltaMode === 2 ? this.box.clientHeight : 1;
    this.scrollBy(event.deltaY * unit);
  }

  click(event) {
    const row = event.target.closest(".row");
    if (row && !String(getSelection())) this.chosen(Number(row.dataset.block));
  }
}
