// Rounds as bars: accepted draft tokens, and on top of them the token that is the target's own.

import { ORIGINS } from "./tokens.js";

const NAMES = Object.fromEntries(ORIGINS.map(([letter, name]) => [letter, name]));
const MARGIN = { left: 22, right: 4, top: 6, bottom: 18 };
const WIDEST_BAR = 22;
const NARROWEST_BAR = 4;
const MEAN_OVER = 8;

/** An element of SVG with attributes. */
export function shape(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export class RoundPlot {
  /** @param onChoose called with the first round that is pointed at and the one behind the last, or with nothing. */
  constructor(svg, hint, onChoose) {
    this.svg = svg;
    this.hint = hint;
    this.onChoose = onChoose;
    this.rounds = [];
    this.draftLen = 4;
    this.chosen = -1;
    this.frame = 0;
    new ResizeObserver(() => this.request()).observe(svg);
    svg.addEventListener("pointermove", (event) => this.choose(this.columnAt(event.offsetX)));
    svg.addEventListener("pointerleave", () => this.choose(-1));
    svg.addEventListener("blur", () => this.choose(-1));
    svg.addEventListener("keydown", (event) => this.step(event));
  }

  show(rounds, draftLen) {
    this.rounds = rounds;
    this.draftLen = Math.max(1, draftLen);
    this.request();
  }

  request() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  /** How many rounds share a bar, so that the bars stay wide enough to point at. */
  layout() {
    const width = this.svg.clientWidth - MARGIN.left - MARGIN.right;
    const shared = Math.max(1, Math.ceil((this.rounds.length * NARROWEST_BAR) / Math.max(1, width)));
    const columns = Math.ceil(this.rounds.length / shared);
    return { width, shared, columns, step: Math.min(WIDEST_BAR, width / Math.max(1, columns)) };
  }

  draw() {
    const { width, shared, columns, step } = this.layout();
    const height = this.svg.clientHeight - MARGIN.top - MARGIN.bottom;
    const most = this.draftLen + 1;
    const y = (tokens) => MARGIN.top + height * (1 - tokens / most);
    const shapes = [];
    const every = Math.ceil(most / 5);
    for (let tokens = 0; tokens <= most; tokens += every) {
      shapes.push(shape("line", { class: "grid", x1: MARGIN.left, x2: MARGIN.left + width, y1: y(tokens), y2: y(tokens) }));
      const label = shape("text", { x: MARGIN.left - 7, y: y(tokens) + 4, "text-anchor": "end" });
      label.textContent = String(tokens);
      shapes.push(label);
    }
    for (let column = 0; column < columns; column += 1) {
      shapes.push(...this.bar(column, shared, step, y));
    }
    if (columns > 1) shapes.push(this.mean(columns, shared, step, y));
    const label = shape("text", { x: MARGIN.left, y: MARGIN.top + height + 14 });
    label.textContent = shared > 1 ? `tokens a round; a bar is the mean of ${shared} rounds` : "tokens a round; the line is their mean over 8";
    shapes.push(label);
    this.svg.replaceChildren(...shapes);
    this.svg.setAttribute("aria-label", this.describe());
  }

  bar(column, shared, step, y) {
    const rounds = this.rounds.slice(column * shared, (column + 1) * shared);
    const gap = step > 6 ? 2 : step > 3 ? 1 : 0;
    const place = { x: MARGIN.left + column * step + gap / 2, width: Math.max(0.5, step - gap) };
    const shapes = [];
    if (column === this.chosen) {
      shapes.push(shape("rect", { class: "chosen", x: MARGIN.left + column * step, width: step, y: y(this.draftLen + 1), height: y(0) - y(this.draftLen + 1) }));
    }
    let under = 0;
    const stack = (name, tokens) => {
      if (!tokens) return;
      shapes.push(shape("rect", { class: name, ...place, y: y(under + tokens), height: y(under) - y(under + tokens), rx: 1 }));
      under += tokens;
    };
    stack("accepted", rounds.reduce((sum, round) => sum + round.accepted, 0) / rounds.length);
    for (const letter of "rbp") {
      stack(NAMES[letter], rounds.filter((round) => round.last === letter).length / rounds.length);
    }
    return shapes;
  }

  mean(columns, shared, step, y) {
    const points = [];
    for (let column = 0; column < columns; column += 1) {
      const end = Math.min(this.rounds.length, (column + 1) * shared);
      const last = this.rounds.slice(Math.max(0, end - MEAN_OVER * shared), end);
      const tokens = last.reduce((sum, round) => sum + tokensOf(round), 0) / last.length;
      points.push(`${(MARGIN.left + (column + 0.5) * step).toFixed(1)},${y(tokens).toFixed(1)}`);
    }
    return shape("polyline", { class: "mean", points: points.join(" ") });
  }

  columnAt(x) {
    const { columns, step } = this.layout();
    const column = Math.floor((x - MARGIN.left) / step);
    return column >= 0 && column < columns ? column : -1;
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    const { columns } = this.layout();
    if (event.key in moves && columns) {
      event.preventDefault();
      this.choose(Math.min(columns - 1, Math.max(0, this.chosen + moves[event.key])));
    } else if (event.key === "Escape") {
      this.choose(-1);
    }
  }

  choose(column) {
    if (column === this.chosen) return;
    this.chosen = column;
    this.request();
    const { shared } = this.layout();
    const first = column * shared;
    const rounds = column < 0 ? [] : this.rounds.slice(first, first + shared);
    this.hint.textContent = tell(rounds, first);
    this.onChoose(...(rounds.length ? [first, first + rounds.length] : [0, 0]));
  }

  describe() {
    if (!this.rounds.length) return "No rounds yet";
    const tokens = this.rounds.reduce((sum, round) => sum + tokensOf(round), 0);
    const mean = (tokens / this.rounds.length).toFixed(2);
    return `${this.rounds.length} rounds, ${mean} tokens a round; arrow keys go through them`;
  }
}

function tokensOf(round) {
  return round.accepted + (round.last ? 1 : 0);
}

function tell(rounds, first) {
  if (!rounds.length) return "";
  if (rounds.length > 1) {
    const mean = rounds.reduce((sum, round) => sum + tokensOf(round), 0) / rounds.length;
    return `Rounds ${first + 1} to ${first + rounds.length}: ${mean.toFixed(2)} tokens each`;
  }
  const [round] = rounds;
  const last = round.last ? `, then 1 ${NAMES[round.last]}` : "; the text ended";
  return `Round ${first + 1}: ${round.accepted} accepted${last}`;
}
