// Keys: arrows between blocks and tokens, `/` to search, Esc to let go.

import { at } from "./dom.js";

/** `select(block)` shows a block; the others are the parts of the page. */
export function listen({ flow, focus, search, select, closeTrace, help }) {
  const next = (by) => {
    const from = flow.selected ?? Math.floor(flow.place().top) - Math.max(0, by);
    select(Math.max(flow.first, Math.min(flow.stop - 1, from + by)));
  };
  const screen = () => at("flow").clientHeight * 0.9;
  const keys = {
    ArrowDown: () => next(1),
    ArrowUp: () => next(-1),
    PageDown: () => flow.scrollBy(screen()),
    PageUp: () => flow.scrollBy(-screen()),
    Home: () => flow.goTo(flow.first, 0),
    End: () => flow.goTo(flow.stop - 1, 1),
    ArrowRight: () => focus().trace && focus().move(1),
    ArrowLeft: () => focus().trace && focus().move(-1),
    "/": () => at("query").focus(),
    "?": help,
    Escape: () => (at("found").hidden ? focus().trace && closeTrace() : search.close()),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const writing = event.target.matches("input, select, textarea");
    if (writing && event.key !== "Escape") return;
    // A dialog that has just been closed keeps the focus until the page is drawn again.
    if (event.target.closest("dialog[open]") || (event.target.closest("aside") && /^(Arrow|Page|Home|End)/.test(event.key))) return;
    if (writing) event.target.blur();
    if (!keys[event.key] || (!flow.pages && /^(Arrow(Up|Down)|Page|Home|End)/.test(event.key))) return;
    event.preventDefault();
    keys[event.key]();
  });
}
