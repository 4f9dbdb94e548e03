// Follows logs of runs while they grow: only what is new is fetched.
import { $, askJson, drawn, element } from "./common.js";

const EVERY = 2000, POINTS = 300, WIDE = 460, TALL = 210, LEFT = 44, RIGHT = 16, TOP = 8, BOTTOM = 22;
const COLOURS = 6;
const runs = new Map();                      // name -> {chosen, records, next, n_steps, colour}

const short = (x) => x === 0 ? "0" : Math.abs(x) >= 1e4 ? `${(x / 1000).toFixed(0)}k` : Math.abs(x) >= 1e3 ? `${(x / 1000).toFixed(1)}k` : Math.abs(x) >= 0.01 ? String(Number(x.toPrecision(3))) : x.toExponential(0);

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
}

// ---- what is there
async function refresh() {
  try {
    const { runs: found } = await askJson("api/runs");
    let changed = false;
    for (const { name, n_steps } of found) {
      if (!runs.has(name)) {
        runs.set(name, { chosen: runs.size === 0, records: [], next: 0, colour: runs.size % COLOURS });
        changed = true;
      }
      runs.get(name).n_steps = n_steps;
    }
    if (changed) listRuns();
    $("none").hidden = runs.size > 0;
    const news = await Promise.all([...runs].filter(([, run]) => run.chosen).map(([name, run]) => follow(name, run)));
    if (changed || news.some(Boolean)) draw();
    $("announce").textContent = "";
  } catch (error) {
    $("announce").textContent = `The server does not answer: ${error.message}`;
  }
}

async function follow(name, run) {
  let came = false, more = true;
  while (more) {
    const found = await askJson(`api/run?name=${encodeURIComponent(name)}&from=${run.next}`);
    if (found.anew) run.records = [];
    run.records.push(...found.records);
    came ||= found.anew || found.records.length > 0;
    run.next = found.next;
    more = found.more;
  }
  return came;
}

function listRuns() {
  const legend = $("runs").querySelector("legend");
  $("runs").replaceChildren(legend, ...[...runs].map(([name, run]) => {
    const box = element("input", { type: "checkbox" });
    box.checked = run.chosen;
    box.addEventListener("change", async () => {
      run.chosen = box.checked;
      await refresh();
      draw();
    });
    return element("label", { class: "check" }, box, sample(run.colour, 0), name);
  }));
}

const sample = (colour, dash) => {
  const svg = drawn("svg", { class: "mark", viewBox: "0 0 24 10", "aria-hidden": "true" });
  svg.append(drawn("line", { class: `line c${colour} d${dash}`, x1: 0, x2: 24, y1: 5, y2: 5 }));
  return svg;
};

// ---- charts
// [[x, y]] in at most POINTS points: means of neighbours
function fewer(points) {
  const n = Math.ceil(points.length / POINTS);
  if (n < 2) return points;
  const found = [];
  for (let i = 0; i < points.length; i += n) {
    const part = points.slice(i, i + n);
    found.push([part.reduce((a, p) => a + p[0], 0) / part.length, part.reduce((a, p) => a + p[1], 0) / part.length]);
  }
  return found;
}

// Parts of a curve: where a step has no such number, as where a head rested, a part ends
function series(run, value, dots) {
  const parts = [[]];
  for (const r of run.records) {
    const y = value(r);
    if (Number.isFinite(y)) parts.at(-1).push([r.step, y]);
    else if (!dots && Number.isFinite(r.ms) && parts.at(-1).length) parts.push([]);
  }
  return parts.filter((part) => part.length).map(fewer);
}

function ticks(low, high) {
  const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((m) => m * unit >= rough) * unit;
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9 * step; t += step) found.push(t);
  return found;
}

// lines: [{name, colour, dash, parts: [[[x, y]]], dots}]
function figure(title, lines) {
  const drawable = lines.filter((line) => line.parts.length);
  const made = element("figure", {}, element("figcaption", {}, title));
  if (!drawable.length) return null;
  const all = drawable.flatMap((line) => line.parts.flat()), xs = all.map((p) => p[0]);
  const ys = all.map((p) => p[1]).sort((a, b) => a - b);
  const right = Math.max(...xs, 1);
  let low = ys[0], high = ys[Math.min(ys.length - 1, Math.floor(ys.length * .995))];
  if (high - low < 1e-12) [low, high] = [low * .9 - 1e-9, high * 1.1 + 1e-9];
  const x = (v) => LEFT + (WIDE - LEFT - RIGHT) * v / right;
  const y = (v) => TALL - BOTTOM - (TALL - TOP - BOTTOM) * (Math.min(v, high) - low) / (high - low);
  const said = drawable.map((line) => `${line.name}: ${short(line.parts.at(-1).at(-1)[1])} at step ${Math.round(line.parts.at(-1).at(-1)[0])}`).join("; ");
  const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": `${title}. ${said}` });
  for (const t of ticks(low, high)) svg.append(drawn("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: y(t), y2: y(t) }), drawn("text", { x: LEFT - 5, y: y(t) + 3, "text-anchor": "end" }, short(t)));
  for (const t of ticks(0, right)) svg.append(drawn("text", { x: x(t), y: TALL - 6, "text-anchor": "middle" }, short(t)));
  for (const { colour, dash, dots, points } of drawable.flatMap((line) => line.parts.map((points) => ({ ...line, points })))) {
    svg.append(drawn("polyline", { class: `line c${colour} d${dash}`, points: points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
    if (dots) points.forEach(([a, b]) => svg.append(drawn("circle", { class: `c${colour}`, fill: "currentColor", cx: x(a), cy: y(b), r: 2.6 })));
  }
  const legend = element("div", { class: "legend", "aria-hidden": "true" }, ...drawable.map((line) => element("span", {}, sample(line.colour, line.dash), line.name)));
  made.append(svg, legend);
  return made;
}

function draw() {
  const chosen = [...runs].filter(([, run]) => run.chosen && run.records.length);
  const alone = chosen.length === 1;
  const label = (name, what) => alone ? what : `${name.replace(/\.jsonl$/, "").replace(/.*\//, "")}, ${what}`;
  const lines = (...kinds) => chosen.flatMap(([name, run]) => kinds.map(([what, value, dots], k) => (
    { name: label(name, what), colour: alone ? k % COLOURS : run.colour, dash: alone ? 0 : k % 4, parts: series(run, value, dots), dots })));
  const heads = Math.max(0, ...chosen.flatMap(([, run]) => run.records.slice(0, 1).map((r) => r.heads?.length ?? 0)));
  const ofHeads = Array.from({ length: heads }, (_, k) => [`head ${k}`, (r) => r.heads?.[k]]);
  $("charts").replaceChildren(...[
    figure("Bits a byte", lines(["of the batch", (r) => r.bits_per_byte], ["held out", (r) => r.val_bits_per_byte, true])),
    figure("Loss of each head", lines(...(heads ? ofHeads : [["loss", (r) => r.loss]]))),
    figure("Learning rate", lines(["lr", (r) => r.lr])),
    figure("Tokens a second", lines(["tokens a second", (r) => r.tokens_per_s])),
    figure("Length of the gradient", lines(["|g|", (r) => r.norm])),
  ].filter(Boolean));
  tiles(chosen[0]);
  samples(chosen);
}

function tiles(newest) {
  if (!newest) return $("tiles").replaceChildren();
  const [, run] = newest, steps = run.records.filter((r) => Number.isFinite(r.ms)), last = steps.at(-1);
  if (!last) return $("tiles").replaceChildren();
  const late = steps.slice(-50), mean = (name) => late.reduce((a, r) => a + r[name], 0) / late.length;
  const held = run.records.findLast((r) => Number.isFinite(r.val_bits_per_byte));
  const left = run.n_steps > last.step ? duration((run.n_steps - last.step) * mean("ms") / 1000) : run.n_steps ? "done" : "?";
  const facts = [["step", `${last.step.toLocaleString("en")}${run.n_steps ? ` / ${run.n_steps.toLocaleString("en")}` : ""}`], ["time left", left],
    ["tokens a second", short(mean("tokens_per_s"))], ["bits a byte", Number.isFinite(last.bits_per_byte) ? mean("bits_per_byte").toFixed(3) : short(mean("loss"))],
    ["held out", held ? held.val_bits_per_byte.toFixed(3) : "not yet"]];
  $("tiles").replaceChildren(...facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
}

function samples(chosen) {
  const found = chosen.flatMap(([name, run]) => run.records.filter((r) => typeof r.sample === "string").map((r) => ({ name, ...r })));
  $("samples").hidden = !found.length;
  $("texts").replaceChildren(...found.slice(-8).reverse().map((r) => element("article", {}, element("p", { class: "hint" }, `step ${r.step.toLocaleString("en")}${chosen.length > 1 ? ` of ${r.name}` : ""}`), element("pre", {}, r.sample))));
}

await refresh();
setInterval(() => document.hidden || refresh(), EVERY);
