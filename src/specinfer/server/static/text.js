// Text and its origin: a colour, a mark and an underline for each drafter, and text that cannot be seen made visible.

export const MARKS = ["●", "■", "▲", "◆", "✚"]; // by the order in which drafters are met
export const TARGET = "target";

// Drafters in the order in which they were met; from the sixth on they share the last colour.
export class Drafters {
  constructor() {
    this.names = [];
  }

  slot(name) {
    if (name === null || name === undefined) return TARGET;
    let place = this.names.indexOf(name);
    if (place < 0) place = this.names.push(name) - 1;
    return Math.min(place, MARKS.length - 1);
  }

  mark(name) {
    const slot = this.slot(name);
    return slot === TARGET ? "◎" : MARKS[slot];
  }
}

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

export function count(number, word, words = `${word}s`) {
  return `${number} ${number === 1 ? word : words}`;
}

// Why most passes had no tree, as the server gives it; often there is no such reason.
export function noGuesses(reason) {
  return reason ? ` No guesses: ${reason.replace(/\.$/, "")}.` : "";
}

// The folder's name is enough to name a drafter.
export function shortName(name) {
  const parts = name.split("/").filter(Boolean);
  return parts.length > 2 ? parts.at(-1) : name;
}

const SEEN = new Map([
  [" ", "·"],
  ["\n", "↵"],
  ["\r", "␍"],
  ["\t", "⇥"],
  ["\u00a0", "⍽"],
]);

export function visible(text, token) {
  if (!text) return `#${token}`;
  let seen = "";
  for (const char of text) {
    const code = char.codePointAt(0);
    if (SEEN.has(char)) seen += SEEN.get(char);
    else if (code < 0x20) seen += String.fromCodePoint(0x2400 + code);
    else if (code === 0x7f || (code >= 0x80 && code < 0xa0)) seen += "␦";
    else if (/\p{Cf}|\p{Zl}|\p{Zp}/u.test(char)) seen += "‹" + code.toString(16) + "›";
    else seen += char;
  }
  return seen;
}

// How many columns of a monospaced font a character takes.
export function columns(text) {
  let count = 0;
  for (const char of text) {
    const code = char.codePointAt(0);
    count += /\p{M}/u.test(char) ? 0 : code >= 0x1100 && (code < 0x2000 || code > 0x2e7f) ? 2 : 1;
  }
  return count;
}

export function clipped(text, limit) {
  if (columns(text) <= limit) return text;
  const kept = [];
  let room = limit - 1;
  for (const char of text) {
    room -= columns(char);
    if (room < 0) break;
    kept.push(char);
  }
  return kept.join("") + "…";
}

// Writes text in spans, one a token. Text may come later than its tokens, and a token may hold part of a character;
// then the characters go to the token before the next one that is recognized.
export class Painter {
  constructor(place, drafters) {
    this.place = place;
    this.drafters = drafters;
    this.waiting = [];
    this.last = { slot: "", step: -1 };
  }

  expect(text, origin, step) {
    this.waiting.push({ text, slot: this.drafters.slot(origin), step });
  }

  show(text, place = this.place) {
    while (text) {
      const token = this.waiting.shift();
      if (!token) {
        this.write(text, this.last, place);
        return;
      }
      if (token.text.length > text.length && token.text.startsWith(text)) {
        this.write(text, token, place);
        this.waiting.unshift({ ...token, text: token.text.slice(text.length) });
        return;
      }
      let length = text.startsWith(token.text) ? token.text.length : this.unclear(text);
      if (token.text === "") length = 0;
      this.write(text.slice(0, length), token, place);
      text = text.slice(length);
      this.last = token;
    }
  }

  // Up to where the text belongs to a token that is not recognized in it.
  unclear(text) {
    for (const next of this.waiting.slice(0, 8)) {
      const at = next.text && !next.text.includes("\ufffd") ? text.indexOf(next.text) : -1;
      if (at >= 0) return at;
    }
    return text.length;
  }

  write(text, { slot, step }, place) {
    if (!text) return;
    const span = element("span", { className: `token by-${slot}`, textContent: text });
    if (step >= 0) span.dataset.step = step;
    place.append(span);
  }
}
