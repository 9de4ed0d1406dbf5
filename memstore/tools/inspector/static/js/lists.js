// The left column's lists: documents and traces.

import { canWrite } from "./api.js";
import { at, count, counted, fillList, h } from "./dom.js";

/** `choose(document)` is called with the one that is clicked, `act(action, document)` for pin, unpin and forget. */
export function showDocuments(answer, chosen, choose, act) {
  const items = answer.documents.map((document) =>
    h(
      "li",
      { class: document.id === chosen ? "chosen" : "" },
      h(
        "button",
        { type: "button", dataset: { focus: document.id }, title: document.name, "aria-current": document.id === chosen, onclick: () => choose(document) },
        h("span", { class: "name" }, document.pinned ? `${document.name} ` : document.name,
          document.pinned && h("span", { class: "tag" }, "pinned")),
        h("span", { class: "facts" }, `${counted(document.tokens, "token")} in ${counted(document.stop - document.first, "block")}`),
      ),
      canWrite() && document.id === chosen &&
        h("span", { class: "acts" },
          h("button", { type: "button", onclick: () => act(document.pinned ? "unpin" : "pin", document) },
            document.pinned ? "unpin" : "pin"),
          h("button", { type: "button", class: "danger", onclick: () => act("forget", document) }, "forget …")),
    ),
  );
  const more = answer.found - answer.documents.length;
  if (more > 0) items.push(h("li", { class: "empty" }, `and ${count(more)} more: filter them by name`));
  if (!answer.found) items.push(h("li", { class: "empty" }, at("part").value ? "No such name." : h("span", {},
    "No documents yet. Add one: ", h("code", {}, "memstore read TEXT MEMORY"))));
  fillList(at("documents"), items);
}

/** `other` is the trace beside the chosen one; `beside(number)` puts one there. */
export function showTraces(answer, chosen, other, choose, beside, remove) {
  const items = answer.traces.map((trace) =>
    h(
      "li",
      { class: trace.number === chosen || trace.number === other ? "chosen" : "" },
      h(
        "button",
        { type: "button", dataset: { focus: trace.number }, title: trace.question, "aria-current": trace.number === chosen, onclick: () => choose(trace.number) },
        h("span", { class: "name" }, h("span", { class: "number" }, trace.number), trace.question || "(no question)"),
        trace.answer && h("span", { class: "said" }, trace.answer),
        h("span", { class: "facts" }, running(trace) ? h("span", { class: "running" }, "generating") : `${trace.ended ? "" : "interrupted, "}${when(trace.started)}`,
          ` · ${count(trace.steps)} steps · `, h("bdi", {}, trace.documents.join(", "))),
      ),
      (trace.number === chosen ? canWrite() : chosen !== null) && h("span", { class: "acts" },
        trace.number === chosen
          ? h("button", { type: "button", class: "danger", onclick: () => remove(trace.number) }, "remove …")
          : h("button", { type: "button", "aria-pressed": trace.number === other, onclick: () => beside(trace.number) },
            trace.number === other ? "beside ×" : "beside")),
    ),
  );
  const more = answer.found - answer.traces.length;
  if (more > 0) items.push(h("li", { class: "empty" }, `and ${count(more)} older ones`));
  if (answer.trouble) items.push(h("li", { class: "empty danger" }, answer.trouble));
  else if (!answer.found) items.push(h("li", { class: "empty" }, ...(at("ask").hidden
    ? ["No traces yet. Record one: ", h("code", {}, "memstore ask MEMORY QUESTION --trace")] : ["No traces yet: ask a question."])));
  fillList(at("traces"), items);
}

/** Whether a model is generating it now. */
export const running = (trace) => !trace.ended && !trace.quiet;

function when(started) {
  const moment = new Date(started);
  return Number.isNaN(moment.getTime()) ? "" : moment.toLocaleString([], { dateStyle: "short", timeStyle: "short" });
}
