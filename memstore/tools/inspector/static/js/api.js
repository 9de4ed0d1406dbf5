// Questions to the server, which lies at the same address.

// Kept for this tab and this port alone, so that a reload still has it.
const linkToken = new URLSearchParams(location.search).get("token");
if (linkToken !== null) sessionStorage.setItem("token", linkToken);

let writeToken = null;

/** From now on `change` may be asked for; null: nothing can be changed. */
export function allowWrite(token) {
  writeToken = token;
}

export const canWrite = () => writeToken !== null;

/** What the server says at `path`; throws an Error whose message is for people. */
export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined) query.set(name, value);
  }
  return answer(await reach(`/api/${path}?${query}`, { signal, headers: {} }));
}

export async function change(action, asked) {
  const headers = { "content-type": "application/json", "x-memstore-token": writeToken };
  return answer(await reach(`/api/do/${action}`, { method: "POST", headers, body: JSON.stringify(asked) }));
}

/** What an OpenAI-compatible path answers to `asked`, event by event; throws an Error whose message is for people. */
export async function* stream(path, asked, signal) {
  const headers = { "content-type": "application/json" };
  const response = await reach(path, { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (!response.ok || !response.headers.get("content-type").startsWith("text/event-stream")) return void (await answer(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const told = event.replace(/^data: /, "");
      if (told === "[DONE]") continue;
      const said = JSON.parse(told);
      if (said.error) throw failure(said.error.message, 500);
      yield said;
    }
  }
}

async function reach(url, options) {
  try {
    options.headers["x-memstore-page"] = sessionStorage.getItem("token") ?? "";
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("The server no longer answers. Start memstore view again, and open the link that it prints.");
  }
}

async function answer(response) {
  const type = response.headers.get("content-type") ?? "";
  const body = type.startsWith("application/json") ? await response.json() : { message: await response.text() };
  if (response.status === 403 && !body.error) {
    throw new Gone(sessionStorage.getItem("token") === null ? "This tab has no token: open the link that memstore view printed."
      : "This page belongs to a server that has ended. Open the last link that memstore view printed.");
  }
  if (!response.ok) throw failure(body.error?.message ?? body.message, response.status); // the first: as OpenAI has it
  return body;
}

const failure = (message, status) => Object.assign(new Error(message), { status });

/** The server is gone, or another one has taken its place. */
export class Gone extends Error {}
