// Tokens by how they came, and the rounds that they came in. Texts of models are only ever text nodes.

export const ORIGINS = [
  ["a", "accepted", "drafted, and kept by the target"],
  ["r", "recovered", "the target's own, in place of the first draft token that it rejected"],
  ["b", "bonus", "the target's own, behind a draft that it kept whole"],
  ["p", "plain", "from a round without a draft"],
];

/** Rounds, told from their tokens: a round ends with the one token that is the target's own. */
export class Rounds {
  constructor() {
    this.list = [];
    this.counts = { a: 0, r: 0, b: 0, p: 0 };
    this.isOpen = false;
  }

  /** Add a token; returns the number of its round, from 0. */
  add(origin) {
    this.counts[origin] += 1;
    if (!this.isOpen) this.list.push({ accepted: 0, last: "" });
    const round = this.list[this.list.length - 1];
    this.isOpen = origin === "a";
    if (this.isOpen) round.accepted += 1;
    else round.last = origin;
    return this.list.length - 1;
  }

  /** Tokens of a round on average; there is one at least. */
  meanTokens() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0) / this.list.length;
  }
}

/** The legend above the text, with a count for each origin. */
export class Legend {
  constructor(list) {
    this.counts = {};
    for (const [letter, name, meaning] of ORIGINS) {
      const item = document.createElement("li");
      item.title = meaning;
      const sample = document.createElement("span");
      sample.className = `token ${letter}`;
      sample.textContent = "ab";
      sample.setAttribute("aria-hidden", "true");
      const count = document.createElement("b");
      item.append(sample, `${name} `, count);
      list.append(item);
      this.counts[letter] = count;
    }
    this.show({ a: 0, r: 0, b: 0, p: 0 });
  }

  show(counts) {
    for (const [letter, element] of Object.entries(this.counts)) element.textContent = String(counts[letter]);
  }
}

/** The text, a span for each token, added once a frame. */
export class TokenView {
  constructor(box) {
    this.box = box;
    this.waiting = document.createDocumentFragment();
    this.byRound = [];
    this.marked = [];
    this.frame = 0;
  }

  clear() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.waiting = document.createDocumentFragment();
    this.box.replaceChildren();
    this.byRound = [];
    this.marked = [];
  }

  /** Show the prompt that the text goes on from. */
  begin(prompt) {
    this.clear();
    if (!prompt) return;
    const echo = document.createElement("span");
    echo.className = "prompt-echo";
    echo.textContent = prompt;
    this.box.append(echo);
  }

  add(text, origin, round) {
    const token = document.createElement("span");
    token.className = `token ${origin}`;
    token.textContent = text;
    (this.byRound[round] ??= []).push(token);
    this.waiting.append(token);
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.frame = 0;
    const box = this.box;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.append(this.waiting);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  /** Mark the tokens of some rounds, or none. */
  mark(first, end) {
    for (const token of this.marked) token.classList.remove("of-round");
    this.marked = this.byRound.slice(first, end).flat().filter(Boolean);
    for (const token of this.marked) token.classList.add("of-round");
  }
}
