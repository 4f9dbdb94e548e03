// What both pages share: asking the server, making elements.  Text becomes text nodes, never HTML.
const KEY = "nanoeuler.key";

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

function askForKey() {
  const dialog = $("keys");
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => {
    sessionStorage.setItem(KEY, $("key").value);
    done();
  }, { once: true }));
}

// The Response of a request that went well; a Refused otherwise
export async function ask(path, body, signal) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    const said = await response.json().catch(() => null);
    throw new Refused(said?.error?.message ?? `the server says ${response.status}`, response.status, said?.error?.code);
  }
}

export const askJson = async (path, body, signal) => (await ask(path, body, signal)).json();

// Yields the objects of a stream of server-sent events
export async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const piece of chunks(response.body)) {
    const blocks = (rest + decoder.decode(piece, { stream: true })).split("\n\n");
    rest = blocks.pop();
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
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const percent = (p) => p >= 0.0995 ? `${Math.round(100 * p)} %` : p >= 0.0005 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %";
