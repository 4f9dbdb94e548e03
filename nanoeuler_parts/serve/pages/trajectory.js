// The Euler trajectory of a token, drawn: how long each step is beside the state, how far it turns
// it, and how likely the token that was said would be if the integration stopped there.
import { drawn, element, percent } from "./common.js";

const WIDE = 320, TALL = 168, LEFT = 28, RIGHT = 12, TOP = 34, BOTTOM = 20, NEEDLE = 13;

export function chart(steps, piece, visible) {
  const moves = steps.slice(1), most = Math.max(...moves.map((s) => s.ratio), 1e-9);
  const x = (i) => LEFT + (WIDE - LEFT - RIGHT) * i / Math.max(1, steps.length - 1);
  const y = (share) => TALL - BOTTOM - (TALL - TOP - BOTTOM) * share;
  const width = Math.max(1, Math.min(14, (WIDE - LEFT - RIGHT) / steps.length - 2));
  const svg = drawn("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label":
    `${moves.length} steps, the largest |f|/|x| is ${most.toFixed(2)}; the probability of ${piece} changes from ${percent(steps[0].p)} to ${percent(steps.at(-1).p)}. The table below has all numbers.` });
  svg.append(drawn("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: y(0), y2: y(0) }),
    drawn("text", { x: 2, y: y(1) + 4 }, most.toPrecision(2)), drawn("text", { x: 2, y: y(0) }, "0"),
    drawn("text", { x: 2, y: TALL - 6 }, "layer"));
  moves.forEach((step, i) => {
    const kind = step.name.includes("swiglu") ? "swiglu" : "attention";
    svg.append(drawn("rect", { class: kind, x: x(i + 1) - width / 2, y: y(step.ratio / most), width, height: Math.max(.5, y(0) - y(step.ratio / most)), rx: 1.5, opacity: .75 }));
    const turn = step.angle * Math.PI / 180, from = x(i + 1) - NEEDLE / 2;
    if (moves.length <= 24) {
      svg.append(drawn("line", { class: "axis", x1: from, x2: from + NEEDLE, y1: 20, y2: 20 }),
        drawn("line", { class: "turn", x1: from, x2: from + NEEDLE * Math.cos(turn), y1: 20, y2: 20 - NEEDLE * Math.sin(turn) }));
    }
    if (i % 2 === 1 && moves.length <= 24) svg.append(drawn("text", { x: x(i + .5), y: TALL - 6, "text-anchor": "middle" }, String((i + 1) / 2)));
  });
  svg.append(drawn("polyline", { class: "curve", points: steps.map((s, i) => `${x(i)},${y(s.p)}`).join(" ") }));
  steps.forEach((s, i) => svg.append(drawn("circle", { class: "knot", cx: x(i), cy: y(s.p), r: 2.4 })));

  const swatch = (kind, text) => element("span", {}, element("span", { class: `swatch ${kind}` }), text);
  const legend = element("div", { class: "legend", "aria-hidden": "true" }, swatch("attention", "length of an attention step"), swatch("swiglu", "length of a SwiGLU step"), swatch("p", `probability of ${piece}, from 0 below to 1 above`), ...(moves.length <= 24 ? [element("span", {}, "∠ angle by which a step turns x")] : []));
  const hint = element("p", { class: "hint" }, `Each layer takes two steps: attention looks at other tokens, then SwiGLU transforms each token by itself. A bar is the length of a step, |f|, as a multiple of the length of the state, |x|; the axis ends at ${most.toPrecision(2)}.`);

  const head = element("tr", {}, element("th", { scope: "col" }, "step"), element("th", { class: "number", scope: "col" }, "|f|/|x|"),
    element("th", { class: "number", scope: "col" }, "angle"), element("th", { scope: "col" }, "prediction if stopped here"));
  const rows = steps.map((s) => element("tr", {}, element("td", {}, s.name.trim()),
    element("td", { class: "number" }, s.ratio === undefined ? "" : s.ratio.toFixed(3)),
    element("td", { class: "number" }, s.angle === undefined ? "" : `${s.angle.toFixed(1)}°`),
    element("td", {}, ...s.top.flatMap((t) => [element("span", { class: "likely" }, element("code", {}, visible(t.text)), ` ${percent(t.p)}`), "  "]))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return [svg, legend, hint, element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the trajectory" }, table)];
}
