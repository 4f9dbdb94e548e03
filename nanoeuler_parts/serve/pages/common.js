// What both pages share: asking the server, making elements.  Text becomes text nodes, never HTML.
const KEY = "nanoeuler.key";
const SENDABLE = /^[\x21-\x7e]+$/;             // characters that a header may carry
const SILENT = "The server does not answer. Is it still running?";

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const $ = (id) => document.getElementById(id);

export class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The browser reports a connection that fails or breaks as a TypeError, in words of its own.
const plain = (error) => error instanceof TypeError ? new Refused(SILENT, 0) : error;

let typedKey = null; // of the open dialog: requests at the same time share it

// The key that the user types; null after Cancel or Escape
function askForKey(problem) {
  typedKey ??= new Promise((done) => {
    const dialog = $("keys");
    $("keys-problem").textContent = problem;
    $("key").value = "";
    dialog.returnValue = "";
    $("keys-cancel").onclick = () => dialog.close("");
    dialog.addEventListener("close", () => {
      typedKey = null;
      done(dialog.returnValue === "use" ? $("key").value : null);
    }, { once: true });
    dialog.showModal();
  });
  return typedKey;
}

// The key of this tab.  A browser may forbid storage: then it is kept until the page is left.
let heldKey = null;

function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return heldKey;
  }
}

function storeKey(key) {
  heldKey = key;
  try {
    if (key === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, key);
  } catch {
    // heldKey has it
  }
}

// Asks for a key in place of the one that was sent, unless another request has asked meanwhile.
async function replaceKey(sent) {
  let problem = sent ? "That key was rejected." : "";
  while (storedKey() === sent) {
    const key = await askForKey(problem);
    if (key === null) {
      storeKey(null);
      throw new Refused("The server needs an API key.", 401);
    }
    if (SENDABLE.test(key)) storeKey(key);
    problem = "That key was rejected.";
    if (key === sent) return;
  }
}

// The Response of a request that went well; a Refused otherwise
export async function ask(path, body, signal) {
  for (;;) {
    const key = storedKey();
    const headers = { ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
    } catch (error) {
      throw plain(error);
    }
    if (response.ok) return response;
    if (response.status === 401) {
      await replaceKey(key);
      continue;
    }
    const said = await response.json().catch(() => null);
    throw new Refused(said?.error?.message ?? `the server returned HTTP status ${response.status}`, response.status, said?.error?.code);
  }
}

export async function askJson(path, body, signal) {
  const response = await ask(path, body, signal);
  try {
    return await response.json();
  } catch (error) {
    throw plain(error);
  }
}

// Yields the objects of a stream of server-sent events.  Pieces are joined only where an event ends, so
// that a long event of many pieces is searched once.
export async function* events(response) {
  const decoder = new TextDecoder();
  let pieces = [], last = "";                // last: the character before the next piece
  for await (const bytes of chunks(response.body)) {
    const piece = decoder.decode(bytes, { stream: true }), ends = (last + piece).includes("\n\n");
    pieces.push(piece);
    last = (last + piece).slice(-1);
    if (!ends) continue;
    const blocks = pieces.join("").split("\n\n");
    pieces = [blocks.pop()];
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
}

async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw plain(error);
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const percent = (p) => p >= 0.0995 ? `${Math.round(100 * p)} %` : p >= 0.0005 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %";

// A button that copies a text, and says whether that went well
export function copyButton(textOf, label = "Copy") {
  const made = element("button", { type: "button", class: "quiet", "aria-live": "polite" }, label);
  made.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(textOf());
      made.textContent = "Copied";
    } catch {                                // only pages of https and of this machine may
      made.textContent = "Not allowed here";
    }
    setTimeout(() => { made.textContent = label; }, 1500);
  });
  return made;
}
