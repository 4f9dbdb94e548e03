// Shows the logs of training runs while they grow.  Each poll reads only the bytes that are new.
// A log is untrusted input: `checked` keeps the fields that this page draws, within their ranges.
import { $, askJson, drawn, element } from "./common.js";

const POLL_MS = 2000, GROWING = 30;          // seconds since the last write of a run that trains
const QUIET = 60, QUIET_STEPS = 5;           // without news for longer, a run is not said to train
const POINTS = 300, WIDE = innerWidth < 500 ? 330 : 460;
const TALL = 210, LEFT = 44, RIGHT = 34, TOP = 8, BOTTOM = 22;
const COLOURS = 8, DASHES = 4, LABEL = 11, NEAR = 16;    // height and width of a run's number
// limits, so that no log can freeze the page
const MOST_RUNS = 200, MOST_READS = 16, MOST_RECORDS = 50_000, MOST_STEPS = 2 ** 40;
const MOST_HEADS = 64, MOST_GAPS = 50, MOST_TICKS = 12, MOST_SAMPLES = 8, LONGEST_SAMPLE = 4000;
const RANGES = {
  loss: [-1e12, 1e12], bits_per_byte: [-1e12, 1e12], val_bits_per_byte: [-1e12, 1e12],
  val_loss: [-1e12, 1e12], margin: [-1e12, 1e12], reward: [-1e12, 1e12], val_reward: [-1e12, 1e12],
  lr: [0, 1e6], norm: [0, 1e15], ms: [0, 1e12], tokens_per_s: [0, 1e15], age: [0, 1e10],
};

let runs = new Map();                        // name -> run, in the order of the list
let byHand = false;                          // has the user chosen runs?
let newestThen = null;                       // the newest run when the user chose
let offered = "";                            // name of the run that the page offers to follow
let pinned = null, hovered = null;           // numbers of runs: highlighted by click, by mouse
let timer = 0;

function short(x) {
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1e6) return x.toExponential(1);
  if (size >= 1e3) return `${Number((x / 1000).toPrecision(4))}k`;
  return size >= 0.01 ? String(Number(x.toPrecision(3))) : x.toExponential(0);
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), minutes = Math.round(s / 60);
  const hours = Math.floor(minutes / 60), rest = minutes % 60;
  if (s < 90) return `${s} s`;
  if (minutes < 90) return `${minutes} min`;
  if (hours >= 48) return `${Math.round(hours / 24).toLocaleString("en")} days`;
  return rest ? `${hours} h ${rest} min` : `${hours} h`;
}

const shortName = (name) => name.slice(name.lastIndexOf("/") + 1).replace(/\.jsonl$/, "");

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
    if (record.sample !== undefined) run.samples = [...run.samples, record].slice(-MOST_SAMPLES);
    else run.records.push(record);
  }
  while (run.records.length > MOST_RECORDS) run.records = thinned(run.records);
}

function forget(run) {
  run.records = [];
  run.samples = [];
}

// ---- the list of runs
function newRun(name, number) {
  const run = { name, number, chosen: false, slot: null, next: 0 };
  forget(run);
  return run;
}

// Takes over the time of the last write and the latest step from the server's list
function renew(run, found) {
  run.changed = Number(found.changed) || 0;
  run.age = within(found.age, RANGES.age) ? found.age : 0;
  run.step = isCount(found.step) ? found.step : 0;
  run.planned = isCount(found.n_steps) ? found.n_steps : 0;
  run.ms = within(found.ms, RANGES.ms) ? found.ms : 0;
  run.stopped = found.stopped === true;
}

const hasEnded = (run) => run.planned > 0 && run.step >= run.planned;
const isQuiet = (run) => run.age > Math.max(QUIET, QUIET_STEPS * run.ms / 1000);
const trains = (run) => !hasEnded(run) && !run.stopped && !isQuiet(run);

function state(run) {
  if (hasEnded(run)) return `ended ${duration(run.age)} ago`;
  if (run.stopped) return `stopped ${duration(run.age)} ago`;
  return isQuiet(run) ? `no news for ${duration(run.age)}` : "training";
}

// The first 8 chosen runs differ in color, the next 8 are dashed, and so on.
const style = (slot) => ({ colour: slot % COLOURS, dash: Math.floor(slot / COLOURS) % DASHES });

// A chosen run gets its former slot, or else the first one that is free.
function select(run, chosen) {
  run.chosen = chosen;
  if (!chosen) return;
  const taken = [...runs.values()].filter((r) => r.chosen && r !== run).map((r) => r.slot);
  if (run.slot !== null && !taken.includes(run.slot)) return;
  run.slot = 0;
  while (taken.includes(run.slot)) run.slot++;
}

// Takes over what the server lists.  Runs that are being written count as equally new and keep
// their places, so that two of them do not swap at each poll.
function arrange(listed) {
  const kept = [...runs.keys()].filter((name) => listed.some((found) => found.name === name));
  const fresh = listed.map((found) => found.name).filter((name) => !runs.has(name));
  let number = Math.max(0, ...[...runs.values()].map((run) => run.number)) + fresh.length;
  const all = new Map();
  for (const name of fresh) all.set(name, newRun(name, number--));
  for (const name of kept) all.set(name, runs.get(name));
  for (const found of listed) renew(all.get(found.name), found);
  const newest = Math.max(0, ...listed.map((found) => Number(found.changed) || 0));
  const age = (run) => newest - run.changed < GROWING ? 0 : newest - run.changed;
  runs = new Map([...all].sort(([, a], [, b]) => age(a) - age(b)));
}

// The newest run that trains, or else the newest run
const newestRun = () => [...runs.values()].find(trains) ?? runs.values().next().value;

// Until the user chooses, the page follows `newestRun`; then it offers another such run.
function followNewest() {
  const newest = newestRun(), chosen = [...runs.values()].filter((r) => r.chosen);
  if (!newest) return;
  if (!byHand && !newest.chosen) {
    if (chosen.length) $("follow").textContent = `Now following ${newest.name}.`;
    chooseAlone(newest);
    return;
  }
  const offer = byHand && newest.name !== newestThen && !newest.chosen ? newest.name : "";
  if (!byHand || offer === offered) return;
  offered = offer;
  $("follow").replaceChildren(...(offer ? [`${offer} is ${trains(newest) ? "training" : "newer"}. `,
    element("button", { type: "button", onclick: () => followAgain() }, "Follow this run")] : []));
}

function chooseAlone(run) {
  for (const other of runs.values()) other.chosen = false;
  select(run, true);
}

function followAgain() {
  byHand = false;
  offered = $("follow").textContent = "";
  refresh();
}

// Replaces the children of an element.  The control that has the focus keeps it, by its name.
function replaceChildren(parent, children) {
  const name = parent.contains(document.activeElement) ? document.activeElement.name : "";
  parent.replaceChildren(...children);
  if (name) parent.querySelector(`[name="${CSS.escape(name)}"]`)?.focus();
}

// The elements of a run in the list: a label with a check box, the mark of its curve and its state
function newRow(run) {
  const box = element("input", { type: "checkbox", name: run.name });
  box.addEventListener("change", () => choose(run, box.checked));
  const sign = element("span", { class: "sign" }), said = element("span", { class: "hint" });
  const label = element("label", { class: "check", "data-run": run.number }, box, sign,
    element("span", {}, `${run.number} · ${run.name} `, said));
  return { label, box, sign, said };
}

function listRuns() {
  for (const run of runs.values()) {
    run.row ??= newRow(run);
    run.row.box.checked = run.chosen;
    run.row.sign.replaceChildren(...(run.chosen ? [mark(style(run.slot))] : []));
    run.row.said.textContent = state(run);
  }
  const legend = $("runs").querySelector("legend");
  const rows = [legend, ...[...runs.values()].map((run) => run.row.label)];
  const same = rows.length === $("runs").children.length &&
    rows.every((row, i) => row === $("runs").children[i]);
  if (!same) replaceChildren($("runs"), rows);
}

function choose(run, chosen) {
  select(run, chosen);
  if (pinned === run.number) pinned = null;
  byHand = true;
  newestThen = newestRun().name;
  offered = $("follow").textContent = "";
  listRuns();
  draw();
  refresh();
}

// ---- highlighting a run
// The curves of other runs become faint.  A click on a name or a curve holds it until the next one.
function highlight() {
  const lit = highlighted(hovered, pinned)?.number ?? null;
  for (const part of $("charts").querySelectorAll("[data-run]")) {
    const own = lit === Number(part.dataset.run);
    part.classList.toggle("lit", own);
    part.classList.toggle("dim", lit !== null && !own);
    if (own && part.ownerSVGElement) part.parentNode.append(part);       // above the others
    if (part.matches("button")) part.setAttribute("aria-pressed", String(own && lit === pinned));
  }
}

// The first of these runs that is drawn, if there are several to tell apart
function highlighted(...numbers) {
  const chosen = chosenRuns(), number = numbers.find((n) => chosen.some((r) => r.number === n));
  return chosen.length > 1 ? chosen.find((run) => run.number === number) : undefined;
}

const runAt = (event) => highlighted(
  Number(event.target.closest?.("[data-run]")?.dataset.run))?.number ?? null;

function hover(event) {
  if (event.pointerType !== "mouse") return;
  const number = runAt(event);
  if (number === hovered) return;
  hovered = number;
  highlight();
}

function pin(event) {
  const number = runAt(event);
  if (number === null) return;
  pinned = pinned === number ? null : number;
  highlight();
  showTiles(chosenRuns());
}

document.addEventListener("pointerover", hover);
$("charts").addEventListener("click", pin);

function mark({ colour, dash }) {
  const svg = drawn("svg", { class: "mark", viewBox: "0 0 24 10", "aria-hidden": "true" });
  svg.append(drawn("line", { class: `line c${colour} d${dash}`, x1: 0, x2: 24, y1: 5, y2: 5 }));
  return svg;
}

// ---- polling
// One update at a time: two at once would read the same records twice.
let updates = Promise.resolve();

// Pending while a button is pressed: a click is lost if its target is replaced before the release.
let released = Promise.resolve();

document.addEventListener("pointerdown", () => {
  released = new Promise((done) => {
    for (const end of ["pointerup", "pointercancel"]) {
      document.addEventListener(end, () => setTimeout(done), { once: true });
    }
  });
});

function refresh() {
  updates = updates.then(update);
  return updates;
}

async function update() {
  try {
    const { runs: listed, folder } = await askJson("api/runs");
    $("folder").textContent = folder ? `: ${folder}` : "";
    arrange(listed.slice(0, MOST_RUNS));
    await released;
    followNewest();
    listRuns();
    $("none").hidden = runs.size > 0;
    const chosen = [...runs.values()].filter((run) => run.chosen);
    const news = await Promise.all(chosen.map(read));
    await released;
    if (news.some(Boolean) || namesOf(chosenRuns()) !== drawnNames) draw();
    else showTiles(chosenRuns());
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

// Numbers of runs beside the ends of their curves, each with a line in the color of its curve.
// Numbers that would overlap move down, and then up, if there is no more space below.
function endLabels(lines, x, y) {
  const labels = lines.map(({ run, colour, parts }) => {
    const [a, b] = parts.at(-1).at(-1);
    return { run, colour, x: x(a), y: y(b), top: y(b) };
  }).sort((p, q) => p.y - q.y);
  const near = (p, q) => Math.abs(p.x - q.x) < NEAR;
  labels.forEach((label, i) => {
    for (const other of labels.slice(0, i)) {
      if (near(label, other)) label.top = Math.max(label.top, other.top + LABEL);
    }
  });
  labels.reverse().forEach((label, i) => {
    label.top = Math.min(label.top, TALL - BOTTOM);
    for (const other of labels.slice(0, i)) {
      if (near(label, other)) label.top = Math.min(label.top, other.top - LABEL);
    }
  });
  return labels.flatMap((label) => [
    drawn("line", { class: `line leader c${label.colour}`, "data-run": label.run, x1: label.x + 1,
      y1: label.y, x2: label.x + 9, y2: label.top }),
    drawn("text", { class: "end", "data-run": label.run, x: label.x + 11, y: label.top + 4 },
      String(label.run))]);
}

// lines: [{name, inLegend, run, colour, dash, faint, dots, ends, parts: [[[x, y]]]}]
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
  const several = drawable.some((line) => line.run !== undefined);
  const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img",
    "aria-label": `${title}. ${latest.join("; ")}` });
  for (const t of ticks(low, high)) {
    svg.append(drawn("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: y(t), y2: y(t) }),
      drawn("text", { x: LEFT - 5, y: y(t) + 3, "text-anchor": "end" }, short(t)));
  }
  svg.append(drawn("text", { x: LEFT - 8, y: TALL - 6, "text-anchor": "end" }, "step"));
  for (const t of ticks(0, right)) {
    svg.append(drawn("text", { x: x(t), y: TALL - 6, "text-anchor": "middle" }, short(t)));
  }
  for (const line of drawable) svg.append(...curve(line, x, y));
  svg.append(...endLabels(drawable.filter((line) => line.ends), x, y));
  const isNamed = (line, i) => !line.faint && !(several &&
    drawable.slice(0, i).some((other) => other.run === line.run && !other.faint));    // a run once
  const legend = element("div", { class: "legend", "aria-hidden": several ? undefined : "true" },
    ...drawable.filter(isNamed).map((line) => several ?
      element("button", { type: "button", class: "quiet", name: `${title} ${line.run}`,
        title: "Highlight this run", "data-run": line.run }, mark(line), line.inLegend) :
      element("span", {}, mark(line), line.inLegend)));
  return element("figure", {}, element("figcaption", {}, title),
    element("p", { class: "hint" }, meaning), svg, legend);
}

function curve({ run, colour, dash, faint, dots, parts }, x, y) {
  const points = (part) => part.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  const owner = run === undefined ? {} : { "data-run": run };
  const look = `line c${colour} d${dash}${faint ? " faint" : ""}`;
  const drawnParts = parts.map((part) => drawn("polyline", { class: look, points: points(part),
    ...owner }));
  if (!dots) return drawnParts;
  return [...drawnParts, ...parts.flat().map(([a, b]) => drawn("circle",
    { class: `c${colour}`, fill: "currentColor", cx: x(a), cy: y(b), r: 2.6, ...owner }))];
}

// Kinds of curves: [name, value of a record, look].  One run: a colour for each kind.  Several
// runs: the style of each run, and its number at the end of its curve.
function lines(chosen, ...kinds) {
  const alone = chosen.length === 1, found = [];
  for (const run of chosen) {
    kinds.forEach(([kind, value, look = {}], k) => {
      const inLegend = alone ? kind : `${run.number} · ${shortName(run.name)}`;
      const name = alone ? kind : `${inLegend}, ${kind}`;
      found.push({ name, inLegend, run: alone ? undefined : run.number, dots: look.dots,
        faint: !alone && look.faint, ends: !alone && !look.faint,
        parts: series(run, value, look.dots), ...style(alone ? k : run.slot) });
    });
  }
  return found;
}

const headsOf = (run) => run.records.reduce((most, r) => Math.max(most, r.heads?.length ?? 0), 0);

// Does this run learn preferences?  Then its loss is that of dpo, also in its validations.
const ofPairs = (run) => run.records.some((r) => r.margin !== undefined);

// Does this run learn from rewards?  Its loss, near 0 in every step, says little.
const ofRewards = (run) => run.records.some((r) => (r.reward ?? r.val_reward) !== undefined);

const MEANING = {
  text: "Mean cross-entropy of the next token, in nats. Lower is better. Nats divided by ln 2 are bits.",
  pairs: "Loss of dpo, in nats: the mean of -ln sigmoid(margin) over the pairs of answers. A margin says " +
    "how much more than the starting model this model prefers the chosen answer. The loss begins at " +
    "ln 2 = 0.693; lower is better.",
};

function lossFigure(chosen) {
  if (chosen.some(ofPairs)) {
    const alone = chosen.every(ofPairs);
    return figure("Loss", alone ? MEANING.pairs : `Runs of train and sft: ${MEANING.text} Runs of dpo: ${
      MEANING.pairs}${chosen.length > 1 ? " Dots: validations." : ""}`,
    lines(chosen, ["loss", (r) => r.loss], ["validation", (r) => r.val_loss, { dots: true }]));
  }
  const heads = chosen.length === 1 ? headsOf(chosen[0]) : 0;
  if (heads < 2) {
    return figure("Loss", MEANING.text, lines(chosen, ["loss", (r) => r.loss]));
  }
  return figure("Loss of each head", "Mean cross-entropy, in nats. Head 0 predicts the next token, " +
    "head 1 the one after it, and so on. A curve ends where the run switches its head off: the " +
    "others only help at the beginning.",
  lines(chosen, ...Array.from({ length: heads }, (_, k) => [`head ${k}`, (r) => r.heads?.[k]])));
}

const chosenRuns = () => [...runs.values()].filter((run) => run.chosen && run.records.length);
const namesOf = (chosen) => chosen.map((run) => run.name).join("\n");
let drawnNames = "";

function draw() {
  const chosen = chosenRuns();
  drawnNames = namesOf(chosen);
  $("choose").hidden = [...runs.values()].some((run) => run.chosen) || !runs.size;
  const validated = (run) => run.records.some((r) => r.val_bits_per_byte !== undefined);
  const faint = chosen.length > 1 && chosen.every(validated);
  replaceChildren($("charts"), [
    figure("Bits per byte", "Bits that the model needs to encode a byte of text; lower is better. " +
      `The model does not train on validation text: if that curve rises, the model overfits.${
      faint ? " Faint lines: batches." : ""}`,
    lines(chosen, ["batch", (r) => r.bits_per_byte, { faint }],
      ["validation", (r) => r.val_bits_per_byte, { dots: true }])),
    figure("Reward", "Mean reward of sampled answers (batch), and of the most probable answers to held-out " +
      "questions (validation). Higher is better.",
    lines(chosen, ["batch", (r) => r.reward], ["validation", (r) => r.val_reward, { dots: true }])),
    lossFigure(chosen.filter((run) => !ofRewards(run))),
    figure("Learning rate (lr)", "How far a step moves the weights. It rises during the warm-up and " +
      "falls towards the end.", lines(chosen, ["lr", (r) => r.lr])),
    figure("Tokens per second", "Training speed.",
      lines(chosen, ["tokens per second", (r) => r.tokens_per_s])),
    figure("Gradient norm (|g|)", "Length of the gradient before clipping. Sudden peaks mean " +
      "unstable steps: try a lower learning rate.", lines(chosen, ["|g|", (r) => r.norm])),
  ].filter(Boolean));
  highlight();
  showTiles(chosen);
  showSamples(chosen);
}

// [name, value] of the tile: of a run that trains, from the planned steps, which the records of a log
// say, and the milliseconds of the latest ones
function timeOf(run, step, ms) {
  if (hasEnded(run)) return ["ended", `${duration(run.age)} ago`];
  if (run.stopped) return ["stopped", `${duration(run.age)} ago`];
  if (isQuiet(run)) return ["no news for", duration(run.age)];
  const isKnown = run.planned && Number.isFinite(ms);
  return ["time left", isKnown ? duration((run.planned - step) * ms / 1000) : "not known yet"];
}

// The numbers of the highlighted run, or else of the first chosen one
function showTiles(chosen) {
  const run = highlighted(pinned) ?? chosen[0];
  const late = run?.records.filter(isStep).slice(-50) ?? [], last = late.at(-1);
  $("tiles").hidden = !last;
  if (!last) return;
  const mean = (name) => {
    const values = late.map((r) => r[name]).filter((x) => x !== undefined);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN;
  };
  const number = (x, text) => Number.isFinite(x) ? text(x) : "unknown";
  const bits = (x) => number(x, (bpb) => bpb.toFixed(3));
  const held = run.records.findLast((r) => r.val_bits_per_byte !== undefined);
  const of = run.planned ? ` / ${run.planned.toLocaleString("en")}` : "";
  const [time, left] = timeOf(run, last.step, mean("ms"));
  const facts = {
    run: `${run.number} · ${shortName(run.name)}`,
    step: `${last.step.toLocaleString("en")}${of}`,
    left,
    speed: number(mean("tokens_per_s"), (x) => Math.round(x).toLocaleString("en")),
    loss: number(mean("loss"), short),
    batch: bits(mean("bits_per_byte")),
    held: held ? bits(held.val_bits_per_byte) : "not yet",
    lr: number(last.lr, short),
    norm: number(last.norm, short),
  };
  for (const value of $("tiles").querySelectorAll("[data-tile]")) {
    value.textContent = facts[value.dataset.tile];
  }
  $("time").textContent = time;
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
