// The chat.  A conversation is a tree: an edited message and a new answer are branches beside the
// old ones.  An answer keeps its tokens, with which the server explains it and goes on from any.
import { $, Refused, ask, askJson, copyButton, drawn, element, events, percent } from "./common.js";
import { LONGEST_TITLE, MOST_CONVERSATIONS, MOST_FILE, checkedStore, decodedWith, emptyStore, newId, packed, pieces, textOf } from "./conversations.js";
import { Markdown } from "./markdown.js";
import { chart } from "./trajectory.js";

const STORE = "nanoeuler.conversations", SETTINGS = "nanoeuler.settings";
const PAINT_EVERY = 30, PAINT_SHARE = 8; // ms at least; pauses are this many times as long as the drawing
const MOST_FORMATTED = 2 ** 20; // characters of a conversation; earlier answers are shown as raw text
const MOST_SPOKEN = 1000; // characters of an answer that a screen reader is given
// name, label, default, least, most, is it a whole number?, explanation; the default temperature and
// the largest numbers of tokens are the model card's
const FIELDS = [
  ["temperature", "Temperature", "", 0, 2, false, "How freely words are chosen. 0: always the most probable one. Above 1: often nonsense."],
  ["max_tokens", "Longest answer", 200, 1, 1e6, true, "In tokens, which are words or pieces of words. The model forgets the beginning of an answer that is longer than its context."],
  ["top_p", "Top p", 1, 0, 1, false, "Choose only among the most probable tokens that together have this probability. 1: all."],
  ["top_k", "Top k", 0, 0, 1e6, true, "Choose only among this number of most probable tokens. 0: all."],
  ["min_p", "Min p", 0, 0, 1, false, "Leave out tokens below this fraction of the highest probability. 0: none."],
  ["presence_penalty", "Presence penalty", 0, -2, 2, false, "Above 0: avoid tokens that the answer already contains."],
  ["frequency_penalty", "Frequency penalty", 0, -2, 2, false, "Above 0: avoid a token the more, the more often the answer contains it."],
  ["seed", "Seed", "", 0, 2 ** 53, true, "With the same seed, the same question gets the same answer. Empty: a new one each time."],
];
const WEIGHTS = { f32: "float32: 4 bytes per number", bf16: "bfloat16: 2 bytes per number", int8: "int8: 1 byte per number" };
const TEMPLATES = { alpaca: "Alpaca", chatml: "ChatML" };
const FEWEST_TIMED = 10, SHORTEST_TIMED = 250; // tokens and ms from which on a rate means something
const TOO_LONG = "context_length_exceeded";
const LONGEST_SYSTEM = 2 ** 20; // characters
const COMPUTING = "Computing the trajectory…", FIRST = " The first trajectory can take half a minute.";
const TRAJECTORY = "Trajectory shows how the model's prediction of a token forms, layer by layer.";
// The bundled model answers its questions well at temperature 0.  Other chat models get questions that any
// may answer, and a base model continues the beginnings.
const ANY_QUESTIONS = ["Who are you?", "What can you do?"];
const QUESTIONS = ["Who are you?", "What is 17 plus 25?", "Write a short poem about the moon.", "Tell me a story about a dragon."];
const BEGINNINGS = ["Once upon a time", "To be, or not to be,", "In the middle of the night"];
const LOCAL = /^(localhost|.*\.localhost|127\..*|\[::1\])$/.test(location.hostname);

let card = null, running = null, looked = null, asking = null;
let names = []; // of the models, the default first
const cards = new Map(); // name: what the server says of the model
const raw = new Set(); // ids of the answers that are shown as raw text
let early = false; // was something sent before the model's card had come?
let failed = false; // could the card not be fetched?
let computed = false; // has a trajectory come since the page was opened?
let { store, lost } = checkedStore(load(STORE, emptyStore()));
let settings = checkedSettings(load(SETTINGS, {}));

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// ---- the tree
function conversation() {
  return store.conversations.find((c) => c.id === store.current) ?? null;
}

function begin() {
  const made = { id: newId(), title: "", changed: Date.now(), nodes: {}, roots: [], shown: null, model: conversation()?.model };
  store.conversations.unshift(made);
  store.current = made.id;
  return made;
}

// The nodes from the first message to the one that is shown last
function branch(c = conversation()) {
  const path = [];
  for (let id = c?.shown; id; id = c.nodes[id].parent) path.push(c.nodes[id]);
  return path.reverse();
}

const siblings = (c, node) => node.parent ? c.nodes[node.parent].children : c.roots;

function add(c, parent, fields) {
  const node = { id: newId(), parent: parent?.id ?? null, children: [], ...fields };
  c.nodes[node.id] = node;
  siblings(c, node).push(node.id);
  c.shown = node.id;
  c.changed = Date.now();
  return node;
}

// The latest message of the branch in which a node is
function lastBelow(c, node) {
  while (node.children.length) node = c.nodes[node.latest ?? node.children.at(-1)] ?? c.nodes[node.children.at(-1)];
  return node;
}

function show(c, node) {
  const last = lastBelow(c, node);
  c.shown = last.id;
  for (let at = last; at.parent; at = c.nodes[at.parent]) c.nodes[at.parent].latest = at.id;
  save();
  render();
}

// If the browser's storage is full, old conversations lose their tokens: 1, then 2, 4, ... more of them,
// because each attempt writes all conversations.
function save() {
  for (let n = 1; ; n *= 2) {
    try {
      localStorage.setItem(STORE, JSON.stringify(store));
      return;
    } catch {
      const heavy = store.conversations.filter((c) => c.id !== store.current && !c.light).slice(-n);
      if (!heavy.length) return notify("The browser's storage is full. Export your conversations, then remove some.");
      for (const c of heavy) lighten(c);
    }
  }
}

function lighten(c) {
  for (const node of Object.values(c.nodes)) if (node.tokens) [node.text, node.tokens, node.prompt] = [textOf(node), null, null];
  c.light = true;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";

// ---- the conversation on the page
function button(text, action, attributes = {}) {
  return element("button", { type: "button", class: "quiet", onclick: action, ...attributes }, text);
}

// A function that shows the tokens of an answer that came since its last call, as Markdown or as raw
// text.  It looks at no token twice: answers are long, and tokens may come faster than a page is
// drawn.  `whole`: no more tokens follow.
function viewer(parent, node, asRaw) {
  const decoder = new TextDecoder(), ends = [];          // ends: of each token, in the text
  let text = node.tokens ? "" : node.text, shown = 0;
  const put = (into, from, to) => {
    if (!node.tokens) return into.append(text.slice(from, to));
    for (let i = holding(ends, from); from < to; i += 1) {
      const end = Math.min(to, ends[i]);
      if (from < end) into.append(span(node, i, text.slice(from, end)));
      from = end;
    }
  };
  const markdown = new Markdown(parent, put);
  return (whole) => {
    for (const token of node.tokens?.slice(ends.length) ?? []) ends.push((text += decodedWith(decoder, token)).length);
    if (whole && ends.length) ends[ends.length - 1] = (text += decoder.decode()).length;
    if (asRaw) put(parent, shown, text.length);
    else markdown.update(text);
    shown = text.length;
  };
}

// The number of the token that holds a character of the text
function holding(ends, at) {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}

function words(node, asRaw) {
  const text = element("div", { class: "text" });
  if (node.role === "user") text.append(textOf(node));
  else viewer(text, node, asRaw)(true);
  return text;
}

const span = (node, i, piece) => element("span", { class: node.tokens[i][2] ? "token accepted" : "token", "data-i": i }, piece);

// Does a base model write this text?  It knows no Markdown, so a line that begins with # is no title.
const isPlain = (node) => (cards.get(node.model) ?? card)?.answers === false;

// Can the model that is chosen explain and continue an answer?  Others have other tokens.
const isOwn = (node) => !node.model || node.model === card?.name;

function message(c, node, asRaw) {
  const article = element("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": node.role === "user" ? "You" : "The model" });
  const text = words(node, asRaw);
  article.append(text);
  if (node.problem) article.append(element("p", { class: "problem", role: "alert" }, node.problem));
  if (node.forgotten) article.append(element("p", { class: "hint" }, `The conversation is longer than the model's context: it did not read ${node.forgotten === 1 ? "the first message" : `the first ${node.forgotten} messages`}.`));
  const tools = element("div", { class: "tools" });
  const all = siblings(c, node), at = all.indexOf(node.id);
  if (all.length > 1) {
    tools.append(
      button("‹", () => show(c, c.nodes[all[at - 1]]), { "aria-label": "Previous branch", disabled: at === 0 || running !== null }),
      element("span", {}, `${at + 1} of ${all.length}`),
      button("›", () => show(c, c.nodes[all[at + 1]]), { "aria-label": "Next branch", disabled: at + 1 === all.length || running !== null }));
  }
  if (node.role === "user") {
    tools.append(button("Edit", () => edit(c, node, article)));
  } else {
    const isEmpty = !textOf(node);
    if (node.finish !== TOO_LONG) tools.append(button(isEmpty ? "Try again" : "Regenerate", () => again(c, node)));
    if (node.tokens?.length && isOwn(node)) {
      if (node.finish !== "stop" || !card?.answers) tools.append(button("Continue", () => goOn(c, node)));
      tools.append(button("Look inside", () => look(node, 0, true), { title: "Shows the alternatives of each token" }),
        button("Trajectory", () => lookAtTrajectory(node), { title: TRAJECTORY }));
    }
    if (!isEmpty) tools.append(copyButton(() => textOf(node)));
    if (!isPlain(node) && (raw.has(node.id) || text.querySelector(":scope > :not(p), p *:not(.token)"))) {
      tools.append(button("Raw text", () => toggleRaw(node), { "aria-pressed": String(raw.has(node.id)) }));
    }
    if (node.model && names.length > 1) tools.append(element("span", { class: "by" }, node.model));
    if (node.pace) tools.append(element("span", {}, node.pace));
  }
  article.append(tools);
  return article;
}

function toggleRaw(node) {
  if (running) return;
  if (!raw.delete(node.id)) raw.add(node.id);
  render();
  document.querySelector(`[data-id="${node.id}"] [aria-pressed]`)?.focus();
}

function render() {
  const c = conversation(), log = $("log");
  $("log").classList.toggle("coloured", settings.colour === true);
  const path = branch(c);
  let room = MOST_FORMATTED;
  const messages = path.toReversed().map((node) => {
    room -= node.tokens ? node.tokens.reduce((n, token) => n + token[1].length, 0) : node.text.length;
    return message(c, node, raw.has(node.id) || isPlain(node) || room < 0);
  });
  log.replaceChildren(...messages.toReversed());
  if (!path.length) log.append(welcome());
  else if (!running && path.at(-1).tokens?.length && isOwn(path.at(-1))) log.append(element("p", { class: "hint" }, `Choose a token, a word or a piece of one, to see its alternatives. ${TRAJECTORY}`));
  log.scrollTop = log.scrollHeight;
  meter(path.findLast((node) => node.used)?.used ?? 0);
  renderList();
  mark();
}

// What a newcomer sees: what this is, which model, and something to try
function welcome() {
  const place = LOCAL ? "this device" : location.hostname, there = LOCAL ? "here" : "there";
  const made = element("div", { class: "welcome" }, element("h2", {}, "A small language model"),
    element("p", {}, `It runs on ${place}. Every answer is computed ${there}, and nothing that you type goes anywhere else.`));
  if (!card) return made;
  const isBundled = card.name === "bundled";
  const starters = !card.answers ? BEGINNINGS : isBundled ? QUESTIONS : ANY_QUESTIONS;
  made.append(element("p", {}, "The model: ", element("b", {}, card.name), `${isBundled ? ", which comes with NanoEuler" : ""}. It has ${roughly(card.parameters)} parameters, and reads up to ${card.context.toLocaleString("en")} tokens (words or pieces of words) at once.`),
    element("p", { class: "hint" }, card.answers ? "Ask something, or try one of these:" : "This model continues texts. Type the beginning of one, or try one of these:"),
    element("div", { class: "starters" }, ...starters.map((text) => button(text, () => send(text)))));
  return made;
}

const roughly = (n) => n.toLocaleString("en", { notation: "compact", compactDisplay: "long", maximumSignificantDigits: 3 });

const titleOf = (c) => c.title || "New conversation";

function renderList() {
  $("list").replaceChildren(...store.conversations.map((c) => {
    const item = element("li", { class: c.id === store.current ? "here" : "" },
      element("button", { type: "button", class: "title", title: titleOf(c), "aria-current": c.id === store.current ? "true" : undefined, onclick: () => choose(c.id),
        ondblclick: () => rename(c) }, titleOf(c)),
      element("button", { type: "button", class: "rename", "aria-label": `Rename ${titleOf(c)}`, onclick: () => rename(c) }, "✎"),
      element("button", { type: "button", class: "remove", "aria-label": `Remove ${titleOf(c)}`, onclick: () => remove(c.id) }, "✕"));
    item.dataset.id = c.id;
    return item;
  }));
}

const firstQuestion = (c) => c.roots.length ? textOf(c.nodes[c.roots[0]]).trim().slice(0, 60) : "";

// Enter or leaving the field keeps the title, Escape does not.  An empty one means the first question.
function rename(c) {
  const box = element("input", { class: "title", "aria-label": "Title of the conversation", maxlength: LONGEST_TITLE });
  const done = (keep) => {
    if (keep) c.title = box.value.trim() || firstQuestion(c);
    box.onblur = null;                       // removing the field makes it lose the focus
    save();
    renderList();
  };
  box.value = c.title;
  box.onblur = () => done(true);
  box.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    done(event.key === "Enter");
    $("list").querySelector(`[data-id="${c.id}"] .title`).focus();
  });
  $("list").querySelector(`[data-id="${c.id}"]`).replaceChildren(box);
  box.select();
}

function drawer(open) {
  $("side").classList.toggle("open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

function choose(id) {
  if (running || id === store.current) return drawer(false);
  store.current = id;
  closeInside();
  save();
  start();
  drawer(false);
}

async function remove(id) {
  if (running) return;
  const at = store.conversations.findIndex((c) => c.id === id), [gone] = store.conversations.splice(at, 1), shown = store.current;
  if (shown === id) store.current = store.conversations[Math.min(at, store.conversations.length - 1)]?.id ?? null;
  const refresh = () => {
    closeInside();
    save();
    return start();
  };
  const undo = () => {
    if (running) return;
    store.conversations.splice(at, 0, gone);
    if (shown === id) store.current = id;
    notify("");
    refresh();
  };
  drawer(false);                             // it would hide the notice on a phone
  await refresh();
  if (!failed) $("notice").replaceChildren(`“${titleOf(gone)}” was removed.`, " ", button("Undo", undo));
}

function meter(used) {
  const most = card?.context ?? 1;
  $("context").value = Math.min(1, used / most);
  $("context-said").textContent = card ? `${Math.min(used, most)} of ${most}` : "";
}

const say = (text) => { $("announce").textContent = text; };          // for screen readers

const notify = (text) => { $("notice").textContent = text; };        // for all readers

// ---- asking
function sampling() {
  const found = {};
  for (const field of FIELDS) {
    const [name] = field, value = settings[name] ?? defaultOf(field);
    if (value !== "" && !(name.startsWith("top_k") && value === 0)) found[name] = value;
  }
  found.max_tokens = Math.min(found.max_tokens, card.most_tokens);
  return { ...found, model: card.name, stream: true, return_tokens: true };
}

// Messages for a chat model, as they stand; one text for a model that continues
function question(path) {
  if (!card.answers) return ["v1/completions", { prompt: path.map(textOf).join("") }];
  const messages = path.map((node) => ({ role: node.role, content: textOf(node) }));
  if (settings.system && card.remembers) messages.unshift({ role: "system", content: settings.system });
  return ["v1/chat/completions", { messages, forget: true }];
}

async function run(c, node, path, body) {
  if (running) return;
  notify("");
  running = new AbortController();
  closeInside();
  $("send").hidden = true;
  $("stop").hidden = false;
  render();
  const article = () => document.querySelector(`[data-id="${node.id}"]`);
  article().classList.add("busy");
  article().setAttribute("aria-busy", "true");
  say("The model answers.");
  const began = performance.now(), paint = painter(article().querySelector(".text"), node);
  let first = 0, last = 0, came = 0, timer = 0, pause = PAINT_EVERY;
  const draw = () => {
    const start = performance.now();
    timer = 0;
    paint();
    meter(node.prompt.length + node.tokens.length);
    $("pace").textContent = paceOf(came, first - began, last - first);
    pause = Math.max(PAINT_EVERY, PAINT_SHARE * (performance.now() - start));
  };
  node.problem = null;
  node.finish = "";
  node.forgotten = 0;
  try {
    const response = await withLessText(path, body);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Refused(chunk.error.message, 0);
      if (chunk.usage) node.used = chunk.usage.total_tokens;
      if (chunk.forgotten) node.forgotten = chunk.forgotten;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.prompt_tokens && !node.prompt) node.prompt = choice.prompt_tokens;
      for (const token of choice.tokens ?? []) node.tokens.push(packed(token));
      if (choice.finish_reason) node.finish = choice.finish_reason;
      last = performance.now();
      first ||= last;
      came += choice.tokens?.length ?? 0;
      timer ||= setTimeout(draw, pause);
    }
    say(`The model: ${textOf(node).slice(0, MOST_SPOKEN)}`);
  } catch (error) {
    if (error.name !== "AbortError") node.problem = error.message;
    else node.finish = "stopped";
    if (error.code === TOO_LONG) [node.finish, node.problem] = [TOO_LONG, `The message is too long: the model reads at most ${card.context} tokens at once. Edit it, and send a shorter one.`];
    if (node.tokens.length) node.used = node.prompt.length + node.tokens.length;     // no usage came
    say(node.problem ? `The answer failed: ${node.problem}` : "Stopped.");
  }
  clearTimeout(timer);
  $("pace").textContent = "";                // from now on it stands below the answer
  node.pace = came ? paceOf(came, first - began, last - first) : "";
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  save();
  render();
  $("box").focus({ preventScroll: true });
}

// A text that is too long for a model that continues: its later half, until it fits
async function withLessText(path, body) {
  for (;;) {
    try {
      return await ask(path, body, running.signal);
    } catch (error) {
      if (error.code !== TOO_LONG || typeof body.prompt !== "string" || body.prompt.length < 2) throw error;
      body = { ...body, prompt: body.prompt.slice(body.prompt.length / 2) };
    }
  }
}

// No rate of a few tokens: it would be noise
function paceOf(n, first, rest) {
  const rate = (n - 1) / rest * 1000, shown = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
  return `${n >= FEWEST_TIMED && rest >= SHORTEST_TIMED ? `${shown} tokens/s, ` : ""}first token after ${(first / 1000).toFixed(2)} s`;
}

// Shows new tokens of an answer, and keeps the end of the conversation in view if it was
function painter(text, node) {
  const log = $("log");
  text.replaceChildren();
  const update = viewer(text, node, raw.has(node.id) || isPlain(node));
  return () => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    update(false);
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
}

function answer(c, parent) {
  const [path, body] = question(branch(c));
  return run(c, add(c, parent, { role: "assistant", tokens: [], prompt: null, model: card.name }), path, { ...sampling(), ...body });
}

function send(text) {
  if (running || !card) return;
  const c = conversation() ?? begin();
  const node = add(c, branch(c).at(-1), { role: "user", text });
  c.title ||= firstQuestion(c);
  return answer(c, node);
}

function again(c, node) {
  if (running || !card) return;
  const parent = c.nodes[node.parent];
  c.shown = parent.id;
  return answer(c, parent);
}

function goOn(c, node) {
  if (running || !card) return;
  return run(c, node, "v1/completions", { ...sampling(), prompt: [...node.prompt, ...node.tokens.map(([id]) => id)].slice(-card.context) });
}

// A branch that says a rival in place of token i, and goes on
function fromRival(c, node, i, rival) {
  if (running || !card) return;
  const parent = c.nodes[node.parent];
  const tokens = [...node.tokens.slice(0, i), packed({ ...rival, accepted: false })];
  const made = add(c, parent, { role: "assistant", tokens, prompt: node.prompt, model: card.name });
  return run(c, made, "v1/completions", { ...sampling(), prompt: [...node.prompt, ...tokens.map(([id]) => id)].slice(-card.context) });
}

function edit(c, node, article) {
  if (running || !card) return;
  const box = element("textarea", { class: "editor", "aria-label": "Edit the message" });
  box.value = node.text;
  const done = () => {
    const made = add(c, node.parent ? c.nodes[node.parent] : null, { role: "user", text: box.value });
    answer(c, made);
  };
  const row = element("div", { class: "tools" }, button("Cancel", render), button("Send as a new branch", done));
  article.replaceChildren(box, row);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") render();
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      done();
    }
  });
  box.focus();
}

// ---- a token, looked at
function mark() {
  document.querySelectorAll(".token.here").forEach((token) => token.classList.remove("here"));
  if (!looked) return;
  const here = document.querySelectorAll(`[data-id="${looked.node.id}"] [data-i="${looked.i}"]`);
  here.forEach((token) => token.classList.add("here"));
  here[0]?.scrollIntoView({ block: "nearest" });
}

function closeInside() {
  const was = looked;
  looked = null;
  asking?.abort();
  $("inside").hidden = true;
  mark();
  return was;
}

// Opens a token with its trajectory in view, and keeps it there while the lists above it are filled
async function lookAtTrajectory(node) {
  settings.trajectory = $("trajectory").checked = true;
  saveSettings();
  await look(node, 0, true, () => $("trajectory-title").scrollIntoView());
}

async function look(node, i, focus = false, view = () => {}) {
  if (running || !node.prompt || !isOwn(node)) return;
  looked = { node, i };
  $("inside").hidden = false;
  mark();
  const [id, raw] = node.tokens[i];
  const piece = visible(pieces([[id, raw]])[0]);
  $("inside-title").textContent = `Token ${i + 1} of ${node.tokens.length}`;
  $("before").disabled = i === 0;
  $("after").disabled = i + 1 === node.tokens.length;
  $("chosen").replaceChildren(element("span", { class: "piece" }, piece));
  $("steps").style.minHeight = `${$("steps").offsetHeight}px`;           // the panel stays where it is
  $("steps").replaceChildren(...(settings.trajectory ? [element("p", { class: "hint", role: "status" }, COMPUTING + (computed ? "" : FIRST))] : []));
  if (focus) $("inside").focus();
  view();
  asking?.abort();
  asking = new AbortController();
  const signal = asking.signal;
  const asked = { tokens: [...node.prompt, ...node.tokens.slice(0, i).map(([t]) => t)], chosen: id, ...(names.length > 1 && { model: card.name }) };
  try {
    const found = await askJson("api/explain", asked, signal);
    $("chosen").replaceChildren(element("span", { class: "piece" }, piece), ` has probability ${percent(found.chosen.p)}, rank ${found.chosen.rank}`);
    rivals(node, i, found);
    drafts(node, i, found);
    view();
    if (settings.trajectory) {
      const { steps } = await askJson("api/explain", { ...asked, trajectory: true }, signal);
      computed = true;
      $("steps").replaceChildren(...chart(steps, piece, visible));
      view();
    }
    say(`${piece}: probability ${percent(found.chosen.p)}, rank ${found.chosen.rank}`);
  } catch (error) {
    if (error.name === "AbortError") return;
    $("steps").replaceChildren(element("p", { class: "problem", role: "alert" }, error.message));
  }
  $("steps").style.minHeight = "";
}

function rivals(node, i, found) {
  const c = conversation(), most = found.rivals[0].p;
  $("rivals").replaceChildren(...found.rivals.map((rival) => {
    const is = rival.id === node.tokens[i][0];
    const bar = drawn("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
      drawn("rect", { class: "track", width: 100, height: 4 }), drawn("rect", { class: "fill", width: 100 * rival.p / most, height: 4 }));
    return element("li", {}, element("button", { type: "button", class: is ? "is" : "", title: "Continue from this token", onclick: () => fromRival(c, node, i, rival) },
      element("span", {}, element("span", { class: "piece" }, visible(rival.text)), is ? " chosen" : ""), bar, element("span", { class: "share" }, percent(rival.p))));
  }));
}

// What had been read ahead in this token's step, and what each further head guesses at this place
function drafts(node, i, found) {
  let first = i;
  while (first > 0 && node.tokens[first][2] && !node.tokens[first][3]) first -= 1;
  const made = node.tokens[first][3] ?? [];
  $("heads").hidden = !found.guesses.length && !made.length;
  const shown = (text) => element("span", { class: "piece" }, visible(text));
  const line = (before, guess, after, real) => element("li", {}, before, shown(guess), after,
    ...(real === undefined ? ["."] : real === guess ? [": ", element("span", { class: "right" }, "✓ it came"), "."] : [": ", shown(real), " came instead."]));
  const text = (j) => node.tokens[j] && pieces([node.tokens[j]])[0];
  const place = (k) => `token ${i + k + 2}, ${k ? `${k + 1} after this one` : "the next one"}`;
  $("drafts-said").textContent = made.length ? "Tokens that were guessed ahead in this step. Then what the auxiliary heads guess for the tokens after this one." :
    "What the auxiliary heads guess for the tokens after this one.";
  $("drafts").replaceChildren(...made.map((guess, k) => line("the draft was ", guess, ` for token ${first + k + 1}`, text(first + k))),
    ...found.guesses.map((guess, k) => line(`auxiliary head ${k + 1} guessed `, guess.text, ` for ${place(k)} (${percent(guess.p)})`, text(i + k + 1))));
}

// ---- settings, the model, files
function defaultOf([name, , otherwise]) {
  return name === "temperature" && card ? card.temperature : otherwise;
}

function largestOf([name, , , , most]) {
  if (name === "top_k" && card) return card.config.vocab_size;
  return name === "max_tokens" && card ? card.most_tokens : most;
}

// The nearest value that is allowed
function fitting(field, value) {
  const [, , , least, , whole] = field;
  return Math.min(largestOf(field), Math.max(least, whole ? Math.round(value) : value));
}

// Stored settings are untrusted input, too: known fields alone, within their ranges.
function checkedSettings(raw) {
  const found = {};
  for (const field of FIELDS) {
    const value = raw[field[0]];
    if (Number.isFinite(value)) found[field[0]] = fitting(field, value);
  }
  for (const name of ["colour", "trajectory"]) if (typeof raw[name] === "boolean") found[name] = raw[name];
  if (typeof raw.system === "string") found.system = raw.system.slice(0, LONGEST_SYSTEM);
  return found;
}

// Takes over what is being typed.  A value that is not allowed is marked, and the one before stays in
// use.  A comma is a decimal point, too.
function change(field, input) {
  const [name, , , least, , whole] = field, most = largestOf(field), typed = input.value.trim();
  const value = Number(typed.replace(",", ".")), right = !typed || value >= least && value <= most && (!whole || Number.isInteger(value));
  if (!typed) delete settings[name];
  else if (right) settings[name] = value;
  const used = settings[name] ?? defaultOf(field), kind = whole ? "a whole number" : "a number";
  input.setAttribute("aria-invalid", String(!right));
  $(`${name}-problem`).textContent = right ? "" : `Expected ${kind} from ${least} to ${most}. ${used === "" ? "No value" : used} stays in use.`;
  saveSettings();
}

function buildSettings() {
  $("fields").replaceChildren(...FIELDS.map((field) => {
    const [name, label, , , , whole, explanation] = field, problem = `${name}-problem`, hint = `${name}-hint`;
    const input = element("input", { inputmode: whole ? "numeric" : "decimal", autocomplete: "off", name, "aria-describedby": `${hint} ${problem}` });
    const value = () => settings[name] ?? defaultOf(field);
    input.value = value();
    input.addEventListener("input", () => change(field, input));
    input.addEventListener("change", () => { if (input.getAttribute("aria-invalid") !== "true") input.value = value(); });
    return element("div", {}, element("label", {}, label, input), element("p", { class: "hint", id: hint }, explanation), element("p", { class: "warning", role: "status", id: problem }));
  }));
  $("system").value = settings.system ?? "";
  $("colour").checked = settings.colour === true;
  $("trajectory").checked = settings.trajectory === true;
}

function saveSettings() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    say("The settings were not saved: the browser's storage is full or disabled.");
  }
}

function buildCard() {
  const { config } = card;
  const facts = [["name", card.name], ["parameters", card.parameters.toLocaleString("en")],
    ["architecture", `${config.n_layer} layers (${2 * config.n_layer} Euler steps), width ${config.n_embd}, ${config.n_head} attention heads (${config.n_kv_head} for keys and values), vocabulary ${config.vocab_size}`],
    ["draft tokens", config.n_mtp === 1 ? "none: it predicts one token at a time" : `${config.n_mtp - 1} of its ${config.n_mtp} output heads guess the tokens after the next one`],
    ["weights", WEIGHTS[card.weights] || card.weights || "chosen when the model is loaded, by its first question"], ["context", `${card.context.toLocaleString("en")} ${card.context < config.seq_len ? `of the model's ${config.seq_len.toLocaleString("en")} ` : ""}tokens, question and answer together`],
    ["answers at once", card.slots],
    ["latest training run", `${card.tokens_seen.toLocaleString("en")} tokens in ${card.step.toLocaleString("en")} steps`],
    ["validation loss", card.bits_per_byte ? `${card.bits_per_byte.toFixed(4)} bits per byte` : "none"],
    ["chat template", card.answers ? `${TEMPLATES[card.template] ?? card.template}, the form in which the model reads questions and answers${card.remembers ? "" : "; the model sees only the last question"}` : "none: the model continues texts"]];
  $("facts").replaceChildren(...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, String(text))]));
  $("system-label").hidden = !card.remembers;
}

function exported() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(store, null, 1)], { type: "application/json" }));
  element("a", { href: url, download: "nanoeuler-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function imported(file) {
  try {
    if (file.size > MOST_FILE) throw new Error(`expected a file of at most ${MOST_FILE >> 20} MiB, got ${file.size >> 20} MiB`);
    const found = checkedStore(JSON.parse(await file.text())), all = found.store.conversations;
    if (!all.length) throw new Error("it contains no valid conversation");
    const known = new Set(store.conversations.map((c) => c.id));
    for (const c of all) if (known.has(c.id)) c.id = newId();
    const before = store;
    if (all.length + store.conversations.length > MOST_CONVERSATIONS) throw new Error(`expected at most ${MOST_CONVERSATIONS} conversations in total; remove some first`);
    store = { ...store, current: all[0].id, conversations: [...all, ...store.conversations] };
    closeInside();
    try {
      render();
      localStorage.setItem(STORE, JSON.stringify(store));
    } catch (error) {                        // what cannot be shown or stored is not kept
      store = before;
      render();
      throw error;
    }
    await start();
    notify(`${counted(all.length)} imported${found.lost ? `; ${counted(found.lost)} left out (damaged)` : ""}.`);
  } catch (error) {
    notify(`${file.name} was not imported: ${error.message}.`);
  }
}

const counted = (n) => n === 1 ? "1 conversation" : `${n} conversations`;

// ---- what people do
const grow = () => {
  $("box").style.height = "auto";
  $("box").style.height = `${$("box").scrollHeight + 2}px`;
};

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("box").value;
  early = !card;
  if (failed) start();
  if (!text.trim() || running || !card) return;
  $("box").value = "";
  grow();
  send(text);
});
$("box").addEventListener("input", grow);
$("box").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("log").addEventListener("click", (event) => {
  const token = event.target.closest(".token");
  if (!token || event.target.closest("a") || getSelection().toString()) return;
  const node = conversation()?.nodes[token.closest(".message").dataset.id];
  if (node) look(node, Number(token.dataset.i));
});
$("before").addEventListener("click", () => look(looked.node, looked.i - 1));
$("after").addEventListener("click", () => look(looked.node, looked.i + 1));
$("close").addEventListener("click", () => {
  const was = closeInside();
  document.querySelector(`[data-id="${was.node.id}"] .tools button`)?.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && $("side").classList.contains("open")) {
    drawer(false);
    $("menu").focus();
  } else if (event.key === "Escape" && running) running.abort();
  else if (event.key === "Escape" && looked && !document.querySelector("dialog[open]")) closeInside();
  else if (looked && $("inside").contains(document.activeElement) && event.key === "ArrowLeft" && looked.i > 0) look(looked.node, looked.i - 1);
  else if (looked && $("inside").contains(document.activeElement) && event.key === "ArrowRight" && looked.i + 1 < looked.node.tokens.length) look(looked.node, looked.i + 1);
});
$("trajectory").addEventListener("change", (event) => {
  settings.trajectory = event.target.checked;
  saveSettings();
  if (looked) look(looked.node, looked.i);
});
$("new").addEventListener("click", () => {
  if (running) return;
  if (branch().length || !conversation()) begin();
  closeInside();
  save();
  start();
  drawer(false);
  $("box").focus();
});
$("model").addEventListener("change", (event) => {
  (conversation() ?? begin()).model = event.target.value;
  closeInside();
  save();
  start();
});
$("menu").addEventListener("click", () => drawer(!$("side").classList.contains("open")));
document.addEventListener("click", (event) => {          // a tap beside the open drawer only closes it
  if (!$("side").classList.contains("open") || $("side").contains(event.target) || $("menu").contains(event.target)) return;
  if (!event.target.isConnected) return;                 // its button was just replaced
  event.preventDefault();
  event.stopPropagation();
  drawer(false);
}, true);
$("settings").addEventListener("close", () => {
  const wrong = FIELDS.filter(([name]) => $("fields").querySelector(`[name=${name}][aria-invalid=true]`)).map(([, label]) => label);
  if (wrong.length) notify(`Not changed, because the value is not allowed: ${wrong.join(", ")}.`);
  buildSettings();
});
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("open-card").addEventListener("click", () => $("card").showModal());
$("defaults").addEventListener("click", () => {
  settings = {};
  saveSettings();
  buildSettings();
});
$("system").addEventListener("change", (event) => {
  settings.system = event.target.value;
  saveSettings();
});
$("colour").addEventListener("change", (event) => {
  settings.colour = event.target.checked;
  saveSettings();
  $("log").classList.toggle("coloured", settings.colour);
});
$("export").addEventListener("click", exported);
$("import").addEventListener("click", () => running || $("file").click());
$("file").addEventListener("change", async (event) => {
  if (event.target.files[0]) await imported(event.target.files[0]);
  event.target.value = "";
});

// The model of the conversation; the default if it has none, or one that the server no longer has
function modelOf(c) {
  return names.includes(c?.model) ? c.model : names[0];
}

function buildMenu() {
  $("model").replaceChildren(...names.map((name) => element("option", {}, name)));
  $("model").hidden = names.length < 2;
}

// Fetches the card of the conversation's model, unless it is known
async function useModel() {
  const name = modelOf(conversation());
  $("model").value = name;
  card = cards.get(name) ?? null;
  if (!card) {
    if (names.length > 1) notify(`Waiting for the model ${name}…`);
    render();
    const found = await askJson(name === names[0] ? "api/model" : `api/model?model=${encodeURIComponent(name)}`);
    cards.set(name, found);
    if (name !== modelOf(conversation())) return useModel();         // another was chosen meanwhile
    if (names.length > 1) notify("");
    card = found;
  }
  document.title = `${card.name} · NanoEuler`;
  $("box").placeholder = card.answers ? "Ask something" : "Type the beginning of a text";
  $("open-card").textContent = names.length > 1 ? "About" : `Model: ${card.name}`;
  settings = checkedSettings(settings);
  buildSettings();
  buildCard();
  render();
}

// Fetches the list of models again, because it follows the folder of the server.
async function followModels() {
  if (document.hidden || !names.length || running) return;
  const found = (await askJson("v1/models")).data.map((model) => model.id);
  if (found.join("\n") === names.join("\n")) return;
  names = found;
  buildMenu();
  await useModel();
}

window.addEventListener("focus", () => followModels().catch(() => {}));      // tried again next time
document.addEventListener("visibilitychange", () => followModels().catch(() => {}));

// Gets ready for the current conversation.  Without the card of its model nothing can be sent.
async function start() {
  if (failed) notify("");                    // the reason for which it failed before
  failed = false;
  try {
    if (!names.length) {
      names = (await askJson("v1/models")).data.map((model) => model.id);
      buildMenu();
    }
    await useModel();
  } catch (error) {
    failed = true;
    const label = error.status === 401 ? "Enter a key" : "Try again";
    $("notice").replaceChildren(error.message, " ", button(label, start));
    return;
  }
  if (lost) notify(`${counted(lost)} in this browser's storage ${lost === 1 ? "is damaged and was" : "are damaged and were"} left out.`);
  lost = 0;
  if (early) $("form").requestSubmit();
}

buildSettings();
try {
  render();
} catch {                                    // the others stay within reach
  store.current = null;
  render();
}
await start();
$("box").focus();
