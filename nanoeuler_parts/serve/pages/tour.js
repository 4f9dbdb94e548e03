// The live parts of the tour: the reader's own text, asked of the model that the server has loaded.
import { $, askJson, drawn, element, percent } from "./common.js";
import { chart } from "./trajectory.js";

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";
const MOST_SHOWN = 32;                         // tokens of a heat map
const FIRST = { tokens: "Tell me a joke.", attention: "The cat sat on the mat.", trajectory: "What is the capital of Norway?" };
const EXPLAINED = {
  tokens: "Ask the model, then choose a token of its answer. The bars show what else it could have written there.",
  attention: "Each row is a token. The darker a square, the more this token attends to the token of that column.",
  trajectory: "Ask the model, then choose a token of its answer. The picture shows each Euler step that led to it.",
};

const live = $("live"), part = live.dataset.part;
const base = "../";                            // the pages lie in tour/
let card = null, pending = new AbortController();
let prompt = [], answer = [];                  // [{ id, text }]

const box = element("input", { id: "live-text", value: FIRST[part], maxlength: 400, autocomplete: "off" });
const problem = element("p", { class: "warning", role: "alert" });
const shown = element("div", { class: "live-text" });
const result = element("div", { id: "live-result", role: "region", "aria-label": "Result", "aria-live": "polite" });
const form = element("form", { class: "row", onsubmit: (event) => { event.preventDefault(); begin(); } },
  element("label", { for: "live-text", class: "unseen" }, "Text"), box, element("button", { type: "submit" }, "Ask"));
live.append(element("h2", {}, "Try it"), element("p", { class: "hint" }, EXPLAINED[part]), form, problem, shown, result);

async function guarded(work) {
  pending.abort();
  const { signal } = pending = new AbortController();
  problem.textContent = "";
  try {
    await work(signal);
  } catch (error) {
    if (!signal.aborted) problem.textContent = error.message;
  }
}

// The ids and texts of the prompt, and of a reply of at most 30 tokens
async function begin() {
  await guarded(async (signal) => {
    card ??= await askJson(`${base}api/model`, undefined, signal);
    const settings = { max_tokens: Math.min(30, card.most_tokens), temperature: 0, return_tokens: true };
    const said = card.answers
      ? await askJson(`${base}v1/chat/completions`, { ...settings, messages: [{ role: "user", content: box.value }] }, signal)
      : await askJson(`${base}v1/completions`, { ...settings, prompt: box.value }, signal);
    const [choice] = said.choices;
    prompt = choice.prompt_tokens ?? [];
    answer = choice.tokens ?? [];
    show();
    if (part === "attention") await attention(signal, card.config.n_layer, 0);
    else if (answer.length) await explain(signal, 0);
  });
}

function show() {
  result.replaceChildren();
  const pieces = answer.map((token, i) => part === "attention" ? element("span", { class: "piece" }, visible(token.text))
    : element("button", { type: "button", class: "quiet piece", onclick: () => guarded((signal) => explain(signal, i)) }, visible(token.text)));
  shown.replaceChildren(...(answer.length ? pieces : ["The model ended its answer at once."]));
}

async function explain(signal, i) {
  const tokens = [...prompt, ...answer.slice(0, i).map((token) => token.id)];
  const body = { tokens, chosen: answer[i].id, ...(part === "trajectory" && { trajectory: true }) };
  const found = await askJson(`${base}api/explain`, body, signal);
  [...shown.children].forEach((child, j) => child.setAttribute("aria-pressed", String(i === j)));
  if (part === "trajectory") result.replaceChildren(...chart(found.steps, visible(answer[i].text), visible));
  else alternatives(found.rivals);
}

// The probabilities at another temperature: p^(1/T), normalized again over the tokens that are shown
function alternatives(rivals) {
  const slider = element("input", { type: "range", min: 0.1, max: 2, step: 0.1, value: 1, id: "live-temperature" });
  const list = element("ol", { class: "live-bars" }), said = element("output", { for: "live-temperature" });
  const draw = () => {
    const weights = rivals.map((rival) => rival.p ** (1 / slider.value));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    said.textContent = `temperature ${Number(slider.value).toFixed(1)}`;
    list.replaceChildren(...rivals.map((rival, j) => {
      const p = weights[j] / total, bar = element("progress", { max: 1, value: p, "aria-label": visible(rival.text) });
      return element("li", {}, element("span", { class: "piece" }, visible(rival.text)), bar, element("span", { class: "share" }, percent(p)));
    }));
  };
  slider.addEventListener("input", draw);
  draw();
  result.replaceChildren(element("label", { class: "row" }, slider, said), list,
    element("p", { class: "hint" }, "The ten most probable tokens, with probabilities among these ten."));
}

async function attention(signal, layer, head) {
  const tokens = [...prompt, ...answer.map((token) => token.id)].slice(-MOST_SHOWN);
  const found = await askJson(`${base}api/explain`, { tokens, attention: layer }, signal);
  const choose = (label, count, value, change) => element("label", { class: "row" }, label, element("select", { onchange: (event) => change(Number(event.target.value)) },
    ...Array.from({ length: count }, (_, i) => element("option", { value: i, selected: i === value }, String(i + 1)))));
  result.replaceChildren(element("div", { class: "row" },
    choose("Layer", found.layers, layer - 1, (l) => guarded((next) => attention(next, l + 1, head))),
    choose("Head", found.heads.length, head, (h) => guarded((next) => attention(next, layer, h)))),
  heatMap(found.tokens.map((token) => visible(token.text)), found.heads[head]));
}

function heatMap(texts, rows) {
  const cell = 16, left = 92, top = 92, size = cell * texts.length;
  const svg = drawn("svg", { viewBox: `0 0 ${left + size + 4} ${top + size + 4}`, role: "img", class: "heat", "aria-label": `Attention weights of ${texts.length} tokens` });
  rows.forEach((row, t) => {
    svg.append(drawn("text", { x: left - 4, y: top + cell * (t + .75), "text-anchor": "end" }, texts[t].slice(0, 12)),
      drawn("text", { x: 0, y: 0, transform: `translate(${left + cell * (t + .75)} ${top - 4}) rotate(-90)` }, texts[t].slice(0, 12)));
    row.forEach((weight, s) => {
      const square = drawn("rect", { x: left + cell * s, y: top + cell * t, width: cell - 1, height: cell - 1, "fill-opacity": Math.max(.04, weight) });
      square.append(drawn("title", {}, `${texts[t]} → ${texts[s]}: ${percent(weight)}`));
      svg.append(square);
    });
  });
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Heat map" }, svg);
}
