// Conversations as they are stored and exported, and the check of all that is read back.
// A file and the browser's storage are untrusted input: the page walks along parents and children,
// so that a cycle would freeze it.  `checkedConversation` copies the known fields of a sound tree.
//
// token: [id, its bytes as Latin-1, 1 for an accepted draft or 0, texts that were drafted (if any)]

export const MOST_FILE = 64 * 2 ** 20;       // bytes of an import
export const MOST_CONVERSATIONS = 2000, LONGEST_TITLE = 200;
const MOST_NODES = 10_000;    // nodes: of one conversation
const MOST_TOKENS = 100_000;                 // of all answers of one conversation
const MOST_PROMPT = 2 ** 20, LONGEST_TEXT = 2 ** 22, LONGEST_TOKEN = 1000;
const MOST_DRAFTS = 64;
const ID = /^[0-9A-Za-z-]{1,64}$/;
const ROLES = ["user", "assistant"];

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export const emptyStore = () => ({ version: 1, current: null, conversations: [] });

// ---- tokens
export const packed = (t) => [t.id, String.fromCharCode(...t.bytes), t.accepted ? 1 : 0,
  ...(t.drafts ? [t.drafts] : [])];

const bytesOf = ([, raw]) => Uint8Array.from(raw, (c) => c.charCodeAt(0));

// The text that each token adds.  A character of several tokens comes with the last of them.
export function pieces(tokens) {
  const decoder = new TextDecoder();
  return tokens.map((token, i) => decoder.decode(bytesOf(token), { stream: i + 1 < tokens.length }));
}

export const decodedWith = (decoder, token) => decoder.decode(bytesOf(token), { stream: true });

export const textOf = (node) => node.tokens ? pieces(node.tokens).join("") : node.text;

// ---- the check
const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const isText = (x, most = LONGEST_TEXT) => typeof x === "string" && x.length <= most;
const isListOf = (x, most, holds) => Array.isArray(x) && x.length <= most && x.every(holds);
const isId = (x) => typeof x === "string" && ID.test(x);
const isTokenId = (x) => Number.isInteger(x) && x >= 0 && x < 2 ** 31;
const isDraft = (x) => isText(x, LONGEST_TOKEN);

function isToken(t) {
  return Array.isArray(t) && isTokenId(t[0]) && isText(t[1], LONGEST_TOKEN) &&
    (t[3] === undefined || isListOf(t[3], MOST_DRAFTS, isDraft));
}

function checkedNode(raw, id) {
  if (!isObject(raw) || raw.id !== id || !ROLES.includes(raw.role)) return null;
  if (!isListOf(raw.children, MOST_NODES, isId)) return null;
  const node = { id, parent: raw.parent ?? null, children: [...raw.children], role: raw.role };
  if (isListOf(raw.tokens, MOST_TOKENS, isToken)) {
    node.tokens = raw.tokens.map(([token, bytes, accepted, drafts]) =>
      [token, bytes, accepted ? 1 : 0, ...(drafts ? [[...drafts]] : [])]);
    node.prompt = isListOf(raw.prompt, MOST_PROMPT, isTokenId) ? [...raw.prompt] : null;
    if (node.tokens.length && !node.prompt) Object.assign(node, { text: textOf(node), tokens: null });
  } else if (isText(raw.text)) {
    node.text = raw.text;
  } else {
    return null;
  }
  for (const name of ["finish", "pace", "problem", "model"]) {
    if (isText(raw[name], LONGEST_TOKEN)) node[name] = raw[name];
  }
  for (const name of ["used", "forgotten"]) {
    if (Number.isSafeInteger(raw[name]) && raw[name] >= 0) node[name] = raw[name];
  }
  if (node.children.includes(raw.latest)) node.latest = raw.latest;
  return node;
}

// Is it a forest?  Each node is reached exactly once from the roots, and names its parent.
function isForest(nodes, roots) {
  const reached = new Set(), open = roots.map((id) => [id, null]);
  while (open.length) {
    const [id, parent] = open.pop();
    if (reached.has(id) || !Object.hasOwn(nodes, id) || nodes[id].parent !== parent) return false;
    if (parent === null && nodes[id].role !== "user") return false;
    reached.add(id);
    for (const child of nodes[id].children) open.push([child, id]);
  }
  return reached.size === Object.keys(nodes).length;
}

// A copy of a conversation as the page writes it; null where it is not one
export function checkedConversation(raw) {
  if (!isObject(raw) || !isId(raw.id) || typeof raw.title !== "string") return null;
  if (!isObject(raw.nodes) || !isListOf(raw.roots, MOST_NODES, isId)) return null;
  const entries = Object.entries(raw.nodes), nodes = {};
  if (entries.length > MOST_NODES) return null;
  let tokens = 0;
  for (const [id, rawNode] of entries) {
    const node = isId(id) ? checkedNode(rawNode, id) : null;
    if (!node) return null;
    tokens += node.tokens?.length ?? 0;
    if (node.tokens && tokens > MOST_TOKENS) {           // the text stays, and is one node
      Object.assign(node, { text: textOf(node), tokens: null, prompt: null });
    }
    nodes[id] = node;
  }
  if (!isForest(nodes, raw.roots)) return null;
  const known = isId(raw.shown) && Object.hasOwn(nodes, raw.shown);
  return { id: raw.id, title: raw.title.slice(0, LONGEST_TITLE),
    changed: Number.isFinite(raw.changed) ? raw.changed : 0, nodes, roots: [...raw.roots],
    shown: known ? raw.shown : raw.roots.at(-1) ?? null, ...(raw.light === true && { light: true }),
    ...(isText(raw.model, LONGEST_TOKEN) && { model: raw.model }) };
}

// {store, lost}: the sound conversations of a store or an export, each id once, and the number of
// those that are not
export function checkedStore(raw) {
  const store = emptyStore(), ids = new Set();
  const all = isObject(raw) && Array.isArray(raw.conversations) ? raw.conversations : [];
  for (const found of all.slice(0, MOST_CONVERSATIONS)) {
    const c = checkedConversation(found);
    if (!c) continue;
    if (ids.has(c.id)) c.id = newId();
    ids.add(c.id);
    store.conversations.push(c);
  }
  if (ids.has(raw?.current)) store.current = raw.current;
  return { store, lost: all.length - store.conversations.length };
}
