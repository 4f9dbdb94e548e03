// Shows the logs of training runs while they grow.  Each poll reads only the bytes that are new.
// A log is untrusted input: `checked` keeps the fields that this page draws, within their ranges.
import { $, askJson, drawn, element } from "./common.js";

const POLL_MS = 2000, GROWING = 30;          // seconds since the last write of a run that trains
const POINTS = 300, WIDE = innerWidth < 500 ? 330 : 460, TALL = 210, LEFT = 44, RIGHT = 22, TOP = 8, BOTTOM = 22;
const COLOURS = 8, DASHES = 4;
// limits, so that no log can freeze the page
const MOST_RUNS = 200, MOST_READS = 16, MOST_RECORDS = 50_000, MOST_STEPS = 2 ** 40;
const MOST_HEADS = 64, MOST_GAPS = 50, MOST_TICKS = 12, MOST_SAMPLES = 8, LONGEST_SAMPLE = 4000;
const RANGES = {
  loss: [-1e12, 1e12], bits_per_byte: [-1e12, 1e12], val_bits_per_byte: [-1e12, 1e12],
  lr: [0, 1e6], norm: [0, 1e15], ms: [0, 1e12], tokens_per_s: [0, 1e15],
};

let runs = new Map();                        // name -> run, in the order of the list
let byHand = false;                          // has the user chosen runs?
let newestThen = null;                       // the newest run when the user chose
let timer = 0;

function short(x) {
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1e6) return x.toExponential(1);
  if (size >= 1e3) return `${Number((x / 1000).toPrecision(4))}k`;
  return size >= 0.01 ? String(Number(x.toPrecision(3))) : x.toExponential(0);
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes}:${two(s % 60)}`;
  return `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(s % 60)}`;
}

const shortName = (name) => name.replace(/\.jsonl$/, "").replace(/.*\//, "");

// ---- records
const within = (x, [least, most]) => typeof x === "number" && x >= least && x <= most;

const isCount = (x) => Number.isInteger(x) && x >= 0 && x <= MOST_STEPS;

// The fields of a record that are drawn; null without a valid step
function checked(raw) {
  if (!raw || !isCount(raw.step)) return null;
  const record = { step: raw.step };
  for (const [name, range] of Object.entries(RANGES)) {
    if (within(raw[name], range)) record[name] = raw[name];
  }
  if (isCount(raw.n_steps)) record.n_steps = raw.n_steps;
  if (Array.isArray(raw.heads) && raw.heads.length <= MOST_HEADS &&
      raw.heads.every((x) => within(x, RANGES.loss))) record.heads = raw.heads;
  if (typeof raw.sample === "string") record.sample = raw.sample.slice(0, LONGEST_SAMPLE);
  return record;
}

const isStep = (record) => record.ms !== undefined;

// Every second step and every second validation: a long curve keeps its shape
function thinned(records) {
  let steps = 0, others = 0;
  return records.filter((r) => (isStep(r) ? steps++ : others++) % 2 === 0);
}

function append(run, raws) {
  for (const record of raws.map(checked)) {
    if (!record) continue;
    if (record.n_steps) run.planned = record.n_steps;
    if (record.sample !== undefined) run.samples = [...run.samples, record].slice(-MOST_SAMPLES);
    else run.records.push(record);
  }
  while (run.records.length > MOST_RECORDS) run.records = thinned(run.records);
}

function forget(run) {
  run.records = [];
  run.samples = [];
  run.planned = null;
}

// ---- the list of runs
function newRun(name, number) {
  const index = number - 1, round = Math.floor(index / COLOURS);
  const run = { name, number, chosen: false, next: 0, colour: index % COLOURS,
    dash: (index + round) % DASHES, changed: 0 };
  forget(run);
  return run;
}

// Takes over what the server lists.  Runs that are being written count as equally new and keep
// their places, so that two of them do not swap at each poll.  Returns whether the list changed.
function arrange(listed) {
  const before = [...runs.keys()];
  const kept = before.filter((name) => listed.some((found) => found.name === name));
  const fresh = listed.map((found) => found.name).filter((name) => !runs.has(name));
  let number = Math.max(0, ...[...runs.values()].map((run) => run.number)) + fresh.length;
  const all = new Map();
  for (const name of fresh) all.set(name, newRun(name, number--));
  for (const name of kept) all.set(name, runs.get(name));
  for (const found of listed) {
    const run = all.get(found.name);
    run.changed = Number(found.changed) || 0;
  }
  const newest = Math.max(0, ...listed.map((found) => Number(found.changed) || 0));
  const age = (run) => newest - run.changed < GROWING ? 0 : newest - run.changed;
  runs = new Map([...all].sort(([, a], [, b]) => age(a) - age(b)));
  return before.join("\n") !== [...runs.keys()].join("\n");
}

// Until the user chooses, the page follows the newest run; then it offers a newer one.
function followNewest() {
  const newest = runs.values().next().value, chosen = [...runs.values()].filter((r) => r.chosen);
  if (!newest) return false;
  if (!byHand && !newest.chosen) {
    if (chosen.length) $("follow").textContent = `Now following ${newest.name}, the newest run.`;
    chooseAlone(newest);
    return true;
  }
  const offer = byHand && newest.name !== newestThen && !newest.chosen;
  if (byHand) $("follow").replaceChildren(...(offer ? [`${newest.name} is newer. `, element("button",
    { type: "button", onclick: () => followAgain() }, "Follow the newest run")] : []));
  return false;
}

function chooseAlone(run) {
  for (const other of runs.values()) other.chosen = other === run;
}

function followAgain() {
  byHand = false;
  $("follow").textContent = "";
  refresh();
}

function listRuns() {
  const legend = $("runs").querySelector("legend"), focused = document.activeElement?.name;
  $("runs").replaceChildren(legend, ...[...runs.values()].map((run) => {
    const box = element("input", { type: "checkbox", name: run.name });
    box.checked = run.chosen;
    box.addEventListener("change", () => choose(run, box.checked));
    return element("label", { class: "check" }, box, mark(run.colour, run.dash),
      `${run.number} · ${run.name}`);
  }));
  if (focused) $("runs").querySelector(`input[name="${CSS.escape(focused)}"]`)?.focus();
}

function choose(run, chosen) {
  run.chosen = chosen;
  byHand = true;
  newestThen = runs.keys().next().value;
  $("follow").textContent = "";
  draw();
  refresh();
}

function mark(colour, dash) {
  const svg = drawn("svg", { class: "mark", viewBox: "0 0 24 10", "aria-hidden": "true" });
  svg.append(drawn("line", { class: `line c${colour} d${dash}`, x1: 0, x2: 24, y1: 5, y2: 5 }));
  return svg;
}

// ---- polling
// One update at a time: two at once would read the same records twice.
let updates = Promise.resolve();

function refresh() {
  updates = updates.then(update);
  return updates;
}

async function update() {
  try {
    const { runs: listed } = await askJson("api/runs");
    const changed = arrange(listed.slice(0, MOST_RUNS));
    const switched = followNewest();
    if (changed || switched) listRuns();
    $("none").hidden = runs.size > 0;
    const chosen = [...runs.values()].filter((run) => run.chosen);
    const news = await Promise.all(chosen.map(read));
    if (changed || switched || news.some(Boolean)) draw();
    $("announce").textContent = "";
  } catch (error) {
    report(error);
  }
}

// Reads what a log has gained, at most MOST_READS pieces of it.  Returns whether there was any.
async function read(run) {
  let news = false;
  for (let i = 0; i < MOST_READS; i++) {
    let found;
    try {
      found = await askJson(`api/run?name=${encodeURIComponent(run.name)}&from=${run.next}`);
    } catch (error) {
      if (error.status === 404) return news;             // deleted since it was listed
      throw error;
    }
    if (found.anew) forget(run);
    append(run, found.records);
    news ||= found.anew || found.records.length > 0;
    run.next = found.next;
    if (!found.more) break;
  }
  return news;
}

function report(error) {
  const needsKey = error.status === 401;
  $("announce").replaceChildren(error.message);
  if (!needsKey) return;
  clearTimeout(timer);                       // the dialog must not return at each poll
  timer = null;
  $("announce").append(" ", element("button", { type: "button", onclick: start }, "Enter a key"));
}

async function poll() {
  if (!document.hidden) await refresh();
  if (timer !== null) timer = setTimeout(poll, POLL_MS);
}

async function start() {
  timer = 0;
  await poll();
}

// ---- charts
// [[x, y]] in at most POINTS points: means of neighbours
function fewer(points) {
  const n = Math.ceil(points.length / POINTS);
  if (n < 2) return points;
  const found = [];
  for (let i = 0; i < points.length; i += n) {
    const part = points.slice(i, i + n);
    const mean = (k) => part.reduce((sum, p) => sum + p[k], 0) / part.length;
    found.push([mean(0), mean(1)]);
  }
  return found;
}

// Parts of a curve.  A step without the number ends a part, as where a head is switched off.
function series(run, value, dots) {
  const parts = [[]];
  for (const r of run.records) {
    const y = value(r);
    if (y !== undefined) parts.at(-1).push([r.step, y]);
    else if (!dots && isStep(r) && parts.at(-1).length && parts.length < MOST_GAPS) parts.push([]);
  }
  return parts.filter((part) => part.length).map(fewer);
}

// At most MOST_TICKS round numbers from low to high
function ticks(low, high) {
  const rough = (high - low) / 6;
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 5].find((m) => m * unit >= rough) ?? 10);
  const first = Math.ceil(low / step), found = [];
  for (let i = 0; i < MOST_TICKS; i++) {
    const tick = (first + i) * step;         // may equal the one before, where low is large
    if (!(tick <= high + 1e-9 * step)) break;
    if (tick !== found.at(-1)) found.push(tick);
  }
  return found;
}

// The range of y: all points, but for the largest half percent
function rangeOf(points) {
  const ys = points.map((p) => p[1]).sort((a, b) => a - b);
  const low = ys[0], high = ys[Math.min(ys.length - 1, Math.floor(ys.length * .995))];
  const least = 1e-9 * Math.max(Math.abs(low), Math.abs(high), 1e-3);
  if (high - low >= least) return [low, high];
  const margin = 0.1 * Math.abs(low) || 1e-9;
  return [low - margin, high + margin];
}

// Numbers of runs at the ends of their curves; a number that would cover another moves away
// from the nearer edge.
function endLabels(lines, x, y) {
  const placed = [];
  return lines.map(({ number, colour, parts }) => {
    const [a, b] = parts.at(-1).at(-1), left = x(a) + 4;
    const way = y(b) < TALL / 2 ? 10 : -10;
    let top = y(b) + 3;
    for (const other of placed.sort((p, q) => way * (p.top - q.top))) {
      if (Math.abs(other.left - left) < 14 && Math.abs(other.top - top) < 10) top = other.top + way;
    }
    placed.push({ left, top });
    return drawn("text", { class: `end c${colour}`, x: left, y: top }, String(number));
  });
}

// lines: [{name, inLegend, number, colour, dash, faint, dots, ends, parts: [[[x, y]]]}]
function figure(title, meaning, lines) {
  const drawable = lines.filter((line) => line.parts.length);
  if (!drawable.length) return null;
  const all = drawable.flatMap((line) => line.parts.flat());
  const right = all.reduce((most, p) => Math.max(most, p[0]), 1), [low, high] = rangeOf(all);
  const x = (v) => LEFT + (WIDE - LEFT - RIGHT) * v / right;
  const share = (v) => Math.min(1, Math.max(0, (v - low) / (high - low)));
  const y = (v) => TALL - BOTTOM - (TALL - TOP - BOTTOM) * share(v);
  const latest = drawable.map((line) => {
    const [step, value] = line.parts.at(-1).at(-1);
    return `${line.name}: ${short(value)} at step ${Math.round(step)}`;
  });
  const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img",
    "aria-label": `${title}. ${latest.join("; ")}` });
  for (const t of ticks(low, high)) {
    svg.append(drawn("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: y(t), y2: y(t) }),
      drawn("text", { x: LEFT - 5, y: y(t) + 3, "text-anchor": "end" }, short(t)));
  }
  for (const t of ticks(0, right)) {
    svg.append(drawn("text", { x: x(t), y: TALL - 6, "text-anchor": "middle" }, short(t)));
  }
  for (const line of drawable) svg.append(...curve(line, x, y));
  svg.append(...endLabels(drawable.filter((line) => line.ends), x, y));
  const legend = element("div", { class: "legend", "aria-hidden": "true" },
    ...drawable.filter((line) => !line.faint).map((line) =>
      element("span", {}, mark(line.colour, line.dash), line.inLegend)));
  return element("figure", {}, element("figcaption", {}, title),
    element("p", { class: "hint" }, meaning), svg, legend);
}

function curve({ colour, dash, faint, dots, parts }, x, y) {
  const points = (part) => part.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  const style = `line c${colour} d${dash}${faint ? " faint" : ""}`;
  const drawnParts = parts.map((part) => drawn("polyline", { class: style, points: points(part) }));
  if (!dots) return drawnParts;
  return [...drawnParts, ...parts.flat().map(([a, b]) => drawn("circle",
    { class: `c${colour}`, fill: "currentColor", cx: x(a), cy: y(b), r: 2.6 }))];
}

// Kinds of curves: [name, value of a record, style].  One run: a colour for each kind.  Several
// runs: a colour and a dash for each run, and its number at the end of its curve.
function lines(chosen, ...kinds) {
  const alone = chosen.length === 1, found = [];
  for (const run of chosen) {
    kinds.forEach(([kind, value, style = {}], k) => {
      const inLegend = alone ? kind : `${run.number} · ${shortName(run.name)}`;
      const name = alone ? kind : `${inLegend}, ${kind}`;
      const [colour, dash] = alone ? [k % COLOURS, Math.floor(k / COLOURS) % DASHES] :
        [run.colour, run.dash];
      found.push({ name, inLegend, number: run.number, colour, dash, dots: style.dots,
        faint: !alone && style.faint, ends: !alone && !style.faint,
        parts: series(run, value, style.dots) });
    });
  }
  return found;
}

const headsOf = (run) => run.records.reduce((most, r) => Math.max(most, r.heads?.length ?? 0), 0);

function lossFigure(chosen) {
  const heads = chosen.length === 1 ? headsOf(chosen[0]) : 0;
  if (heads < 2) {
    return figure("Loss", "Mean cross-entropy of the next token, in nats. Lower is better.",
      lines(chosen, ["loss", (r) => r.loss]));
  }
  return figure("Loss of each head", "Mean cross-entropy, in nats. Head 0 predicts the next token, " +
    "head 1 the one after it, and so on.",
  lines(chosen, ...Array.from({ length: heads }, (_, k) => [`head ${k}`, (r) => r.heads?.[k]])));
}

function draw() {
  const chosen = [...runs.values()].filter((run) => run.chosen && run.records.length);
  const validated = (run) => run.records.some((r) => r.val_bits_per_byte !== undefined);
  const faint = chosen.length > 1 && chosen.every(validated);
  $("charts").replaceChildren(...[
    figure("Bits per byte", "Bits that the model needs to encode a byte of text; lower is better. " +
      `The model does not train on held-out text: if that curve rises, the model overfits.${
      faint ? " Faint lines: batches." : ""}`,
    lines(chosen, ["batch", (r) => r.bits_per_byte, { faint }],
      ["held out", (r) => r.val_bits_per_byte, { dots: true }])),
    lossFigure(chosen),
    figure("Learning rate (lr)", "How far a step moves the weights. It rises during the warm-up and " +
      "falls towards the end.", lines(chosen, ["lr", (r) => r.lr])),
    figure("Tokens per second", "Training speed.",
      lines(chosen, ["tokens per second", (r) => r.tokens_per_s])),
    figure("Gradient norm (|g|)", "Length of the gradient before clipping. Sudden peaks mean " +
      "unstable steps: try a lower learning rate.", lines(chosen, ["|g|", (r) => r.norm])),
  ].filter(Boolean));
  showTiles(chosen);
  showSamples(chosen);
}

// Computed from the planned steps, which the records of a log say, and the
// milliseconds of the latest ones
function timeLeft(run, step, ms) {
  const { planned } = run;
  if (!planned || !Number.isFinite(ms)) return "not known yet";
  return step >= planned ? "done" : duration((planned - step) * ms / 1000);
}

function showTiles(chosen) {
  const [run] = chosen, late = run?.records.filter(isStep).slice(-50) ?? [], last = late.at(-1);
  if (!last) return $("tiles").replaceChildren();
  const mean = (name) => {
    const values = late.map((r) => r[name]).filter((x) => x !== undefined);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
  };
  const number = (x, text) => Number.isFinite(x) ? text(x) : "unknown";
  const held = run.records.findLast((r) => r.val_bits_per_byte !== undefined);
  const { planned } = run;
  const of = planned ? ` / ${planned.toLocaleString("en")}` : "";
  const facts = [
    ...(chosen.length > 1 ? [["run", `${run.number} · ${shortName(run.name)}`]] : []),
    ["step", `${last.step.toLocaleString("en")}${of}`],
    ["time left", timeLeft(run, last.step, mean("ms"))],
    ["tokens per second", number(mean("tokens_per_s"), short)],
    last.bits_per_byte === undefined ? ["loss", number(mean("loss"), short)] :
      ["bits per byte, batch", mean("bits_per_byte").toFixed(3)],
    ["bits per byte, held out", held ? held.val_bits_per_byte.toFixed(3) : "not yet"]];
  $("tiles").replaceChildren(...facts.map(([name, text]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, text))));
}

// The latest texts.  Several runs share the places, the newest run first.
function showSamples(chosen) {
  const each = Math.max(1, Math.floor(MOST_SAMPLES / chosen.length));
  const found = chosen.flatMap((run) => run.samples.slice(-each).reverse().map((r) => {
    const of = chosen.length > 1 ? ` of ${run.name}` : "";
    return element("article", {},
      element("p", { class: "hint" }, `step ${r.step.toLocaleString("en")}${of}`),
      element("pre", {}, r.sample));
  }));
  $("samples").hidden = !found.length;
  $("texts").replaceChildren(...found);
}

await start();
