// Markdown as DOM nodes: paragraphs, headings, lists, quotes, short tables, code, **bold**, *italic*, links.
// All text becomes text nodes, so a model's text cannot become a script.  Marks that are not closed
// stay text.  Each step takes linear time; no expression backtracks over more than one line or link.
//
// The caller appends the text itself: put(parent, from, to) adds text[from, to) to a parent.
import { copyButton, element } from "./common.js";

const FENCE = /^ *(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/, HEADING = /^(#{1,6}) +(?=\S)/, RULE = /^ *(-{3,}|\*{3,}|_{3,}) *$/;
const ITEM = /^( *)([-*+]|\d{1,3}[.)]) +(?=\S)/;
const QUOTE = /^( {0,3}> ?)+/;
const LINK = /\[([^[\]]{1,1000})\]\((https?:\/\/[^\s()<>"[\]]{1,2000})\)/iy;
const SPECIAL = /\\[\\`*[\]#|_~-]|`+|\*+|\[/g;
const LETTER = /[0-9A-Za-z]/, BLANK = /\s/;
const DEEPEST = 6, MOST_COLUMNS = 12, MOST_ROWS = 100;
const EMPHASIS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };       // by the number of stars

// ---- blocks
function linesOf(text, from) {
  const lines = [];
  while (from < text.length) {
    const end = text.indexOf("\n", from), to = end < 0 ? text.length : end;
    lines.push({ from, to, text: text.slice(from, to) });
    from = to + 1;
  }
  return lines;
}

const isDelimiter = (line) => line?.text.includes("-") && line.text.includes("|") && /^[-:| ]+$/.test(line.text);

function closes(line, mark) {
  const found = FENCE.exec(line.text);
  return found !== null && found[1].startsWith(mark) && !found[2].trim();
}

function kindOf(lines, i) {
  const { text } = lines[i];
  if (!text.trim()) return "blank";
  if (FENCE.test(text)) return "code";
  if (HEADING.test(text)) return "heading";
  if (RULE.test(text)) return "rule";
  if (QUOTE.test(text)) return "quote";
  if (ITEM.test(text)) return "list";
  if (text.includes("|") && isDelimiter(lines[i + 1])) return "table";
  return "paragraph";
}

// Does a list go on with line i?  Indented text belongs to an item, also after a blank line.
function inList(lines, i) {
  const kind = kindOf(lines, i);
  if (kind === "blank") return i + 1 < lines.length && kindOf(lines, i + 1) !== "blank" && inList(lines, i + 1);
  return kind === "list" || kind === "paragraph" && lines[i].text.startsWith("  ");
}

// The number of the line after the block of line i
function endOf(lines, i, kind) {
  let end = i + 1;
  const more = (holds) => {
    while (end < lines.length && holds(end)) end += 1;
    return end;
  };
  if (kind === "list") return more((j) => inList(lines, j));
  if (kind === "table") return more((j) => lines[j].text.includes("|"));
  if (kind === "quote") return more((j) => kindOf(lines, j) === "quote");
  if (kind === "paragraph") return more((j) => kindOf(lines, j) === "paragraph");
  if (kind !== "code") return end;
  const [, mark] = FENCE.exec(lines[i].text);
  more((j) => !closes(lines[j], mark));
  return Math.min(lines.length, end + 1);
}

function block(text, lines, kind, put) {
  const [{ from }] = lines, { to } = lines.at(-1);
  const within = (parent, a, b) => inline(text, a, b, parent, put);
  if (kind === "rule") return element("hr");
  if (kind === "list") return list(lines, within);
  if (kind === "table") return table(lines, within);
  if (kind === "quote") return quote(lines, within);
  if (kind === "code") return code(text, lines, put);
  if (kind === "heading") {
    const [{ length }, { length: level }] = HEADING.exec(lines[0].text);
    return within(element(`h${Math.min(6, level + 2)}`), from + length, to);   // h1 and h2 are the page's
  }
  return within(element("p"), from, to);
}

function code(text, lines, put) {
  const [, mark, language] = FENCE.exec(lines[0].text), last = lines.at(-1);
  const closed = lines.length > 1 && closes(last, mark);
  const from = Math.min(lines[0].to + 1, last.to), to = Math.max(from, closed ? last.from - 1 : last.to);
  const inside = element("code");
  put(inside, from, to);
  return element("div", { class: "code" },
    element("div", { class: "row" }, element("span", {}, language.trim().slice(0, 40) || "code"), element("span", { class: "grow" }),
      copyButton(() => text.slice(from, to), "Copy the code")),
    element("pre", { tabindex: "0" }, inside));
}

// Its lines without their marks; a quote within a quote is not indented further
function quote(lines, within) {
  const made = element("blockquote");
  for (const line of lines) within(made.appendChild(element("div")), line.from + QUOTE.exec(line.text)[0].length, line.to);
  return made;
}

function list(lines, within) {
  const box = element("div"), open = [];     // {indent, made, item}: the lists around a line
  for (const { text, from, to } of lines) {
    const found = ITEM.exec(text), start = from + text.search(/\S|$/);
    if (!found) {
      if (start < to) within(open.at(-1).item.appendChild(element("div")), start, to);
      continue;
    }
    const [{ length }, { length: indent }, mark] = found, name = mark.length > 1 ? "ol" : "ul";
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    const deeper = open.length > 0 && open.length < DEEPEST && indent >= open.at(-1).indent + 2;
    if (deeper || open.at(-1)?.made.localName !== name) {
      if (!deeper) open.pop();
      const made = element(name, name === "ol" ? { start: parseInt(mark) } : {});
      (open.at(-1)?.item ?? box).append(made);
      open.push({ indent, made });
    }
    open.at(-1).item = open.at(-1).made.appendChild(element("li"));
    within(open.at(-1).item, from + length, to);
  }
  return box;
}

// [from, to) of each cell of a row
function cellsOf({ text, from }) {
  const cells = [], whole = text.trimEnd();
  let at = /^ *\|?/.exec(whole)[0].length;
  for (const piece of whole.slice(at, whole.endsWith("|") ? -1 : undefined).split("|")) {
    cells.push([from + at, from + at + piece.length]);
    at += piece.length + 1;
  }
  return cells;
}

function table(lines, within) {
  const [head, , ...body] = lines.map(cellsOf);
  if (head.length > MOST_COLUMNS || body.length > MOST_ROWS) return within(element("p"), lines[0].from, lines.at(-1).to);
  const row = (name, cells) => element("tr", {}, ...head.map((_, i) => cells[i] ? within(element(name), ...cells[i]) : element(name)));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...body.map((cells) => row("td", cells)))));
}

// ---- marks within a block
function linkAt(s, at) {
  LINK.lastIndex = at;
  const link = LINK.exec(s);
  return link && { at, size: link[0].length, names: ["a"], href: link[2], inner: [at + 1, at + 1 + link[1].length] };
}

// Code between two runs of as many backticks; the caller knows that there is a second one
function codeAt(s, at, size) {
  const ticks = /`+/g;
  ticks.lastIndex = at + size;
  let close = ticks.exec(s);
  while (close[0].length !== size) close = ticks.exec(s);
  return { at, size: ticks.lastIndex - at, names: ["code"], inner: [at + size, close.index] };
}

// The marks of a text in their order: {at, size, names of elements, ...}.  Of each kind of emphasis
// at most one is open, the latest: so no mark looks far back.
function marks(s) {
  const found = [], open = new Map(), lastTicks = new Map();
  for (const { 0: run, index } of s.matchAll(/`+/g)) lastTicks.set(run.length, index);
  SPECIAL.lastIndex = 0;
  for (let match; (match = SPECIAL.exec(s));) {
    const at = match.index, size = match[0].length, [first] = match[0];
    const whole = first === "[" ? linkAt(s, at) : first === "`" && lastTicks.get(size) > at ? codeAt(s, at, size) : null;
    if (whole) {
      found.push(whole);
      SPECIAL.lastIndex = at + whole.size;
    } else if (first === "\\") {
      found.push({ at, size: 1 });
    } else if (first === "*" && size <= 3) {
      stars(s, at, size, found, open);
    }
  }
  return found;
}

function stars(s, at, size, found, open) {
  const before = s[at - 1] ?? " ", after = s[at + size] ?? " ", mate = open.get(size);
  if (mate && !BLANK.test(before) && !LETTER.test(after)) {
    mate.names = EMPHASIS[size];
    found.push({ at, size, closes: size });
    const kinds = [...open.keys()];          // emphasis that opened within ends with it, as text
    for (const kind of kinds.slice(kinds.indexOf(size))) open.delete(kind);
  } else if (!BLANK.test(after) && !LETTER.test(before)) {
    const mark = { at, size, text: true };
    open.delete(size);
    open.set(size, mark);
    found.push(mark);
  }
}

// Appends text[from, to) with its marks to a parent, which it returns
function inline(text, from, to, parent, put) {
  const parents = [parent];
  let at = from;
  for (const mark of marks(text.slice(from, to))) {
    if (mark.text && !mark.names) continue;
    if (at < from + mark.at) put(parents.at(-1), at, from + mark.at);
    at = from + mark.at + mark.size;
    if (mark.closes) parents.length -= 1;
    if (!mark.names) continue;
    const link = mark.href && { href: mark.href, target: "_blank", rel: "noopener noreferrer" };
    let inside = parents.at(-1);
    for (const name of mark.names) inside = inside.appendChild(element(name, link || {}));
    if (mark.inner) put(inside, from + mark.inner[0], from + mark.inner[1]);
    else parents.push(inside);
  }
  if (at < to) put(parents.at(-1), at, to);
  return parent;
}

// A text that grows.  `update` draws the last two blocks again, and what follows: the next words may
// still join them, as the "-" of a list's next item does.
export class Markdown {
  constructor(parent, put) {
    Object.assign(this, { parent, put, from: 0, kept: 0 });
  }

  update(text) {
    while (this.parent.childNodes.length > this.kept) this.parent.lastChild.remove();
    const lines = linesOf(text, this.from);
    let before = null;                       // where the block before begins
    for (let i = 0, end; i < lines.length; i = end) {
      const kind = kindOf(lines, i);
      end = endOf(lines, i, kind);
      if (kind === "blank") continue;
      if (before) Object.assign(this, before);
      before = { from: lines[i].from, kept: this.parent.childNodes.length };
      this.parent.append(block(text, lines.slice(i, end), kind, this.put));
    }
  }
}
