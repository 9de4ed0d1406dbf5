// The ask box: a question, a beginning to go on from, or a chat; answered as it is written.

import { get, stream } from "./api.js";
import { at, h } from "./dom.js";

export class AskBox {
  /** `named()` is the name of the document on the page, if one is open; `begun()` is called when an answer begins, `ended(trace)` when it has ended. */
  constructor(named, begun, ended, tell) {
    Object.assign(this, { named, begun, ended, tell });
    this.stop = null;
    this.turns = [];
    this.turning = Promise.resolve(); // ends when what was said in the chat that was chosen is here
    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stop) this.stop.abort();
      else this.ask();
    });
    at("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.stop) at("ask").requestSubmit();
    });
    at("question").addEventListener("input", () => grow());
    for (const name of ["how", "session"]) {
      at(name).addEventListener("change", () => (this.turning = this.turning.then(() => this.turnTo())));
    }
  }

  /** Let things be asked: of a memory called `name`; `chats` where these may be kept in it. */
  open(name, chats) {
    this.name = name;
    at("ask").hidden = false;
    if (chats) at("how").append(h("option", { value: "chat" }, "chat"));
  }

  get asking() {
    return this.stop !== null;
  }

  /** Another way to ask was chosen: of a chat, what was said is shown. */
  async turnTo() {
    const chat = at("how").value === "chat";
    at("session").hidden = !chat;
    at("among").hidden = chat;
    this.turns = [];
    if (chat) {
      const { conversations } = await get("conversations").catch((error) => (this.tell(error), { conversations: [] }));
      at("sessions").replaceChildren(...conversations.map((each) => h("option", { value: each.session })));
      this.turns = conversations.find((each) => each.session === at("session").value)?.turns ?? [];
    }
    this.show();
  }

  async ask() {
    const words = at("question").value;
    if (!words.trim()) return at("question").focus();
    const how = at("how").value;
    if (how !== "chat" && at("among").value === "this" && !this.named()) return this.tell({ status: 400, message: "No document is open: choose one." });
    const answer = { role: "assistant", text: "" };
    this.stop = new AbortController();
    at("ask").querySelector("button").textContent = "Stop";
    this.begun();
    await this.turning;
    const turns = [...(how === "chat" ? this.turns : []), { role: "user", text: words }, answer];
    this.turns = turns;
    this.show("Loading the model, or reading the question …");
    let last = {};
    try {
      for await (const told of stream(...this.request(how, words), this.stop.signal)) {
        const [choice] = told.choices;
        answer.text += choice?.delta?.content ?? choice?.text ?? "";
        if (told.trace !== undefined) last = told;
        this.show(answer.text ? "" : "Reading the question …");
      }
      at("question").value = "";
      grow();
    } catch (error) {
      if (error.name !== "AbortError") this.tell(error);
    } finally {
      this.stop = null;
      at("ask").querySelector("button").textContent = "Ask";
      if (how !== "chat" && this.turns === turns) this.turns = [];
      this.show();
      await this.ended(last.trace ?? null);
    }
  }

  request(how, words) {
    const metadata = how === "chat" ? { session: at("session").value || "chat" } : at("among").value === "this" ? { document: this.named() } : {};
    const asked = { model: this.name, stream: true, metadata };
    if (how === "raw") return ["/v1/completions", { ...asked, prompt: words }];
    return ["/v1/chat/completions", { ...asked, messages: [{ role: "user", content: words }] }];
  }

  show(status = "") {
    const box = at("asked");
    box.hidden = !this.turns.length;
    box.replaceChildren(...this.turns.map((turn) => h("p", { class: turn.role }, turn.text)),
      ...(status ? [h("p", { class: "facts", role: "status" }, status)] : []));
    box.scrollTop = box.scrollHeight;
  }
}

/** As high as its lines are, however they came to be; the style sheet has the limit. */
function grow() {
  const box = at("question");
  box.style.height = "";
  if (box.scrollHeight > box.clientHeight) box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}
