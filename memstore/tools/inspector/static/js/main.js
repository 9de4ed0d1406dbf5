// The page: which document, block, trace and step are chosen, and who is told of it.
//
// There is no front-end library: what is hard here, half a million rows of any height, no small one has, and the rest
// is less code than a library's upgrades are work. Text of documents only ever becomes text nodes (see dom.js).

import { Gone, allowWrite, change, get } from "./api.js";
import { Answer } from "./answer.js";
import { AskBox } from "./ask.js";
import { Block } from "./block.js";
import { at, count, counted, h } from "./dom.js";
import { Flow } from "./flow.js";
import { listen } from "./keys.js";
import { running, showDocuments, showTraces } from "./lists.js";
import { Pages } from "./pages.js";
import { Search } from "./search.js";
import { Strip } from "./strip.js";
import { showSizes, showTiers } from "./tiers.js";
import { listenToTabs, showTab } from "./tabs.js";
import { showUsed, together } from "./used.js";

const SOON = 500; // milliseconds between two looks at a memory while a model generates
const LATER = 2000;

const state = { memory: null, document: null, documents: null, live: null, lit: [], gone: false, focus: null, turn: 0, newest: 0 };

const flow = new Flow(at("flow"), (block) => runOn("details", selectBlock(block)), (place) => strip.update({ place }));
const strip = new Strip(at("strip"), (block) => flow.goTo(block, 0), (part) => flow.scrollBy(part * at("flow").clientHeight));
const steps = (number, start, stop, layer, head) => get(`traces/${number}`, { start, stop, layer, head });
const overview = (number, start, stop) => get(`traces/${number}/overview`, { start, stop });
const answer = new Answer(at("answer"), steps, overview, (what) => run(traceChosen(answer, what)));
const other = new Answer(at("other"), steps, overview, (what) => run(traceChosen(other, what)));
const box = new AskBox(() => state.document?.raw_name, () => asked(), (trace) => run(answered(trace)), tell);
const block = new Block(
  (path, parameters) => get(`documents/${state.document.id}/blocks/${block.block}${path}`, parameters),
  (number) => runOn("details", goTo(state.document.id, number)),
  (trace, step) => runOn("answer", openTrace(trace, step)),
);
const search = new Search(
  (text, start) => get(`documents/${state.document.id}/find`, { text, start }),
  (text) => get(`documents/${state.document.id}/ask`, { text }),
  (number) => runOn("text", goTo(state.document.id, number)),
  (text, matches) => {
    flow.mark(text);
    strip.update({ matches: matches.map((each) => each.block) });
  },
);

/** Await something that was clicked; what goes wrong is told. */
async function run(promise) {
  try {
    await promise;
    return true;
  } catch (error) {
    if (error.name !== "AbortError") tell(error);
    return false;
  }
}

/** `run`, on the part of the page where it can be seen. */
function runOn(tab, promise) {
  showTab(tab);
  return run(promise);
}

function tell(error) {
  if (!(error instanceof Gone) && error.status === undefined) console.error(error);
  say(error.message);
  state.gone = error instanceof Gone;
}

function say(words) {
  at("trouble").textContent = words;
  at("trouble").hidden = false;
}

function sayNothing() {
  if (!state.gone) at("trouble").hidden = true;
}

// Documents and blocks

async function openDocument(document, number = document.first) {
  sayNothing();
  state.document?.pages?.close();
  const load = (start, stop, signal) => get(`documents/${document.id}/blocks`, { start, stop }, signal);
  const pages = new Pages(load, (blocks) => arrived(document, blocks), (error) => gone(document, error));
  state.document = { ...document, pages };
  search.close();
  block.close();
  title();
  strip.update({ range: document, matches: [] });
  flow.show(pages, document.first, document.stop, number);
  light();
  if (state.documents) listDocuments();
  remember();
}

function arrived(document, answer) {
  if (state.document?.id !== document.id) return;
  grow(answer);
  flow.steady(() => {});
}

function grow({ first, stop, tokens }) {
  const changed = tokens !== state.document.tokens || first !== state.document.first || stop !== state.document.stop;
  if (!changed) return;
  Object.assign(state.document, { first, stop, tokens });
  strip.update({ range: { first, stop } });
  flow.resize(first, stop);
  title();
}

function gone(document, error) {
  if (state.document?.id !== document.id) return;
  if (error.status !== 404) return tell(error);
  closeDocument("This document was forgotten.");
}

function closeDocument(words) {
  state.document?.pages.close();
  state.document = null;
  flow.clear();
  search.close();
  block.close();
  strip.update({ range: { first: 0, stop: 0 } });
  light();
  at("title").replaceChildren(h("p", { class: "empty" }, words));
  remember();
}

function title() {
  const { name, tokens, first, stop } = state.document;
  const left = first > 0 ? `, ${count(first)} of them gone` : "";
  at("title").replaceChildren(h("h2", {}, name),
    h("span", { class: "facts" }, `${counted(tokens, "token")} in ${counted(stop, "block")} of ${state.memory.block_size}${left}`));
}

async function goTo(id, number, offset = null) {
  if (id !== state.document?.id) {
    const document = await find(id);
    if (!document) return;
    await openDocument(document, number);
  }
  flow.reveal(number);
  if (offset !== null) flow.point(number, offset);
  await selectBlock(number);
}

async function find(id) {
  const known = state.documents?.documents.find((each) => each.id === id);
  if (known) return known;
  const part = await get(`documents/${id}/blocks`, { start: 0, stop: 0 });
  return { id, ...part };
}

async function selectBlock(number) {
  if (number < state.document.first || number >= state.document.stop) return;
  sayNothing();
  flow.select(number);
  remember();
  await block.show(number, state.memory);
}

async function loadDocuments() {
  const part = at("part").value;
  state.documents = await get("documents", { part });
  at("part").hidden = state.documents.found < 12 && !part;
  listDocuments();
}

function listDocuments() {
  showDocuments(state.documents, state.document?.id ?? null, (each) => runOn("text", openDocument(each)), (action, each) => run(act(action, each)));
}

// Traces: the one that is open, and another beside it. What was chosen last has the focus.

const focus = () => (state.focus === other && other.trace ? other : answer);

async function openTrace(number, step = null) {
  sayNothing();
  if (other.trace?.number === number) other.close();
  state.focus = answer;
  await answer.open(number, step);
  if (answer.trace?.number !== number) return;
  listTraces();
  showTiers(answer);
  if (answer.step === null) await showTraceUse();
  remember();
}

/** Show another trace beside the open one, or no more. */
async function openBeside(number) {
  if (other.trace?.number === number) return closeBeside();
  await other.open(number);
  state.focus = answer;
  at("pair").classList.add("two");
  showTab("answer");
  listTraces();
  await showTraceUse();
}

async function closeBeside() {
  other.close();
  state.focus = answer;
  at("pair").classList.remove("two");
  listTraces();
  if (answer.trace) await (answer.step === null ? showTraceUse() : showStep());
}

async function traceChosen(which, what) {
  if (what === "close") return which === other ? closeBeside() : closeTrace();
  if (what === "following" && focus() !== which && focus().step !== null) return; // somebody chose a token of the other
  state.focus = which;
  await (which.step === null ? showTraceUse() : showStep());
  remember();
}

function closeTrace() {
  if (other.trace) other.close();
  at("pair").classList.remove("two");
  answer.close();
  at("used").hidden = true;
  state.lit = [];
  light();
  showTiers(answer);
  listTraces();
  remember();
}

/** What the chosen token of `which`, or its whole trace, used; undefined if another choice was made meanwhile. */
async function loadUsed(which, path, turn) {
  const { trace, step, layer, head } = which;
  const used = await get(`traces/${trace.number}/${path}`, { layer, head });
  const now = [which.trace?.number, which.step, which.layer, which.head, state.turn];
  return [trace.number, step, layer, head, turn].every((each, place) => each === now[place]) ? used : undefined;
}

async function showStep() {
  const [which, turn] = [focus(), (state.turn += 1)];
  const { step } = which;
  const used = await loadUsed(which, `steps/${step}`, turn);
  if (used) await lightUp(used, `Used for “${which.piece().trim() || "…"}”, step ${count(step)}`);
}

/** `lead`: to the block that was used most, also where another document of those that were used is on the page. */
async function showTraceUse(lead = false) {
  const turn = (state.turn += 1); // what was asked for before is not shown any more
  const used = await loadUsed(answer, "used", turn);
  const beside = used && other.trace && (await loadUsed(other, "used", turn));
  if (!used || beside === undefined) return;
  if (beside) await lightUp(together(used, beside), "Used by both traces ", [answer.trace.number, other.trace.number]);
  else await lightUp(used, "Used by the whole trace", null, lead);
}

async function lightUp(used, words, named = null, lead = false) {
  showUsed(words, used, (id, number, offset) => runOn("text", goTo(id, number, offset)), named, unit(), state.memory.block_size);
  state.lit = used.blocks;
  const best = used.blocks.find((each) => each.document !== null && each.text !== null);
  if (best && best.document !== state.document?.id && (lead || !used.blocks.some((each) => each.document === state.document?.id))) {
    const document = await find(best.document);
    if (document) await openDocument(document, best.block);
  }
  light();
  const here = used.blocks.find((each) => each.document === state.document?.id && each.weight > 0);
  if (here) flow.reveal(here.block);
}

/** Light what the chosen token used of the document on the page. */
function light() {
  const [lit, picked] = [new Map(), new Map()];
  for (const each of state.lit) {
    if (each.document !== state.document?.id) continue;
    if (each.weight !== null) lit.set(each.block, each.weight); // the others have missed tokens only
    if (each.pieces?.length) picked.set(each.block, each);
  }
  flow.light(lit, picked, unit(), state.memory.block_size);
  strip.update({ lit });
  const [chosen, missed] = ["weight", "missed"].map((what) => [...picked.values()].some((each) => Object.values(each.tokens).some((token) => token[what] !== undefined)));
  at("marks").hidden = !chosen && !missed;
  at("marks").replaceChildren(...(chosen ? [h("span", { class: "picked" }, "chosen"), " by the index, shaded by attention"] : []),
    chosen && missed ? " · " : "", ...(missed ? [h("span", { class: "missed" }, "missed"), ", found by an audit"] : []));
}

/** Tokens that the model of the open traces chooses together. */
const unit = () => answer.trace?.unit ?? 1;

function listTraces() {
  showTraces(state.live, answer.trace?.number ?? null, other.trace?.number ?? null, (number) => runOn("answer", openTrace(number)),
    (number) => run(openBeside(number)), (number) => run(removeTrace(number)));
}

// Questions

function asked() {
  sayNothing();
  state.newest = Math.max(0, ...(state.live?.traces ?? []).map((each) => each.number));
  showTab("answer");
}

/** The trace of what is being answered is opened when it is there. */
async function follow(traces) {
  const mine = traces.find((each) => each.number > state.newest && each.steps);
  if (box.asking && mine && answer.trace?.number !== mine.number) await openTrace(mine.number);
}

async function answered(trace) {
  await look();
  if (trace !== null && answer.trace?.number !== trace) await openTrace(trace);
  if (trace === null || answer.trace?.number !== trace) return;
  if (answer.follow) await answer.choose(null, true); // its last token was chosen by nobody
  if (focus().step === null) await showTraceUse(true);
}

// Changes

function confirmed(words, action) {
  const dialog = at("confirm");
  at("confirm-words").textContent = words;
  const [no, yes] = dialog.querySelectorAll("button");
  yes.textContent = action;
  return new Promise((resolve) => {
    const close = (answered) => () => {
      dialog.close();
      resolve(answered);
    };
    no.onclick = close(false);
    yes.onclick = close(true);
    dialog.oncancel = close(false); // Esc
    dialog.showModal();
  });
}

async function act(action, document) {
  const words = `Forget “${document.name}”, all ${count(document.tokens)} tokens of it? This cannot be undone.`;
  if (action === "forget" && !(await confirmed(words, "Forget it"))) return;
  await change(action, { document: document.id });
  if (action === "forget" && state.document?.id === document.id) closeDocument("This document was forgotten.");
  await loadDocuments();
}

async function removeTrace(number) {
  if (!(await confirmed(`Remove trace ${number}? This cannot be undone.`, "Remove it"))) return;
  await change("remove-trace", { trace: number });
  closeTrace();
  await look();
}

// What others write meanwhile

async function look() {
  const trace = answer.trace?.number ?? -1;
  const live = await get("live", { trace });
  const before = state.live;
  state.live = live;
  if (state.gone) at("trouble").hidden = true; // the server or the memory is back
  state.gone = false;
  showSizes(live.sizes);
  const same = (part) => JSON.stringify(before?.[part]) === JSON.stringify(live[part]);
  if (!same("traces") || !same("trouble")) listTraces();
  if (before && (before.sizes.tokens !== live.sizes.tokens || before.sizes.documents !== live.sizes.documents)) {
    await loadDocuments();
    const [first] = state.documents.documents;
    const now = state.documents.documents.find((each) => each.id === state.document?.id);
    if (now) grow(now);
    else if (!state.document && !before.sizes.documents && first) await openDocument(first); // the memory was empty
    else if (state.document) await find(state.document.id).then(grow, (error) => gone(state.document, error));
  }
  await follow(live.traces);
  if (other.trace) {
    const beside = live.traces.find((each) => each.number === other.trace.number);
    await (beside ? other.update(beside.steps, beside.ended) : closeBeside());
  }
  const mine = live.traces.find((each) => each.number === trace);
  if (answer.trace?.number !== trace) return;
  if (mine) {
    await answer.update(mine.steps, mine.ended);
    showTiers(answer);
  } else if (!live.trouble) {
    closeTrace();
    say(`Trace ${trace} was removed.`);
  }
}

// The page asks and the server does not push: an answer is sizes and counts and what is new of one trace, and a server
// that keeps no connection open has no state of its own to lose.
async function keepLooking() {
  for (;;) {
    const begun = performance.now();
    const well = document.hidden || (await run(look()));
    state.gone ||= !well;
    const taken = performance.now() - begun;
    if (!well && /^This (page belongs to|tab has no token)/.test(at("trouble").textContent)) return;
    await new Promise((later) => setTimeout(later, Math.max(box.asking || state.live?.traces.some(running) ? SOON : LATER, 5 * taken)));
  }
}

// Where the page is, in its address: a reload comes back to it

function remember() {
  const where = { document: state.document?.id, block: flow.selected, trace: answer.trace?.number, step: answer.step };
  const said = Object.entries(where).filter(([, value]) => value !== null && value !== undefined);
  history.replaceState(null, "", `/#${new URLSearchParams(said)}`);
}

function goToTyped(number) {
  const { id, first, stop } = state.document;
  if (number >= first && number < stop) return run(goTo(id, number));
  const blocks = ["no block", `only block ${count(first)}`][stop - first] ?? `blocks ${count(first)} to ${count(stop - 1)}`;
  return say(`There is no block ${count(number)} here: this document has ${blocks}.`);
}

function submit(event) {
  event.preventDefault();
  const query = at("query").value;
  const place = /^#\s*([\d,]+)$/.exec(query);
  sayNothing();
  if (!query.trim()) return search.close();
  if (!state.document) return say("No document is open: choose one.");
  showTab("details"); // where what is found stands
  if (place) return goToTyped(Number(place[1].replaceAll(",", "")));
  return run(at("mode").value === "model" ? search.model(query) : search.text(query));
}

async function start() {
  history.replaceState(null, "", `/${location.hash}`); // without the token
  listen({ flow, focus, search, select: (number) => run(goTo(state.document.id, number)), closeTrace, help: () => at("help").showModal() });
  listenToTabs();
  at("explain").addEventListener("click", () => at("help").showModal());
  at("help").querySelector("button").addEventListener("click", () => at("help").close());
  at("search").addEventListener("submit", submit);
  at("part").addEventListener("input", () => run(loadDocuments()));
  state.memory = await get("memory");
  at("mode").replaceChildren(...[["text", "as text"], ["model", "by the model"]]
    .slice(0, state.memory.can_ask ? 2 : 1).map(([value, words]) => h("option", { value }, words)));
  allowWrite(state.memory.write_token);
  if (state.memory.can_ask) box.open(state.memory.name, state.memory.write_token !== null);
  document.title = `${state.memory.url} · memstore`;
  at("memory").replaceChildren(h("bdi", { dir: "ltr" }, state.memory.url));
  await Promise.all([loadDocuments(), look()]);
  await openRemembered();
  addEventListener("hashchange", () => run(openRemembered())); // an address was typed, or a link to one clicked
  run(sayWhatIsMissing());
}

async function openRemembered() {
  const said = new URLSearchParams(location.hash.slice(1));
  const where = (name) => (said.has(name) && Number.isInteger(Number(said.get(name))) ? Number(said.get(name)) : null);
  const [first] = state.documents.documents;
  const chosen = where("document") === null ? first : await find(where("document")).catch(() => first);
  if (chosen) await openDocument(chosen, where("block") ?? chosen.first);
  else at("title").replaceChildren(h("p", { class: "empty" }, "Nothing to read yet."));
  if (state.live.traces.some((each) => each.number === where("trace"))) await openTrace(where("trace"), where("step"));
  else if (where("document") === null && state.live.traces.length) await openTrace(state.live.traces[0].number);
  else if (answer.trace) closeTrace();
  if (chosen && where("block") !== null) await goTo(chosen.id, where("block"));
}

async function sayWhatIsMissing() {
  const { missing, several } = await get("text");
  if (missing) at("memory").append(h("span", { class: "tag", title: missing }, "token ids: no tokenizer"));
  if (!several) at("among").value = "this"; // this kind of model goes on after one document
}

await run(start());
document.body.removeAttribute("aria-busy");
keepLooking();
