// How the server stands, from GET /status: ranks, queue, KV cache.

import { shape } from "./plot.js";
import { countByDepth, drawTree } from "./tree.js";

const KEPT = 60;
const SCALE_WIDTH = 44; // for the numbers at a line's right end
const STATES = {
  serving: "serving",
  starting: "the engine is starting",
  hanging: "the engine does not get on",
  ending: "the server is ending",
  gone: "no answer",
};

const METHODS = {
  draft_target: "a draft model",
  ngram: "prompt lookup",
  suffix: "suffix decoding",
  token_recycling: "token recycling",
  lookahead: "lookahead decoding",
  medusa: "Medusa heads",
  eagle: "an EAGLE head",
  eagle3: "an EAGLE-3 head",
  dflash: "a DFlash head",
  dspark: "a DSpark head",
};
const SOURCES = {
  ngram: "from the text so far",
  suffix: "from texts so far",
  token_recycling: "from what was likely before",
  lookahead: "from guesses beside the text",
};

export class EngineView {
  constructor(elements) {
    this.elements = elements;
    const percent = (share) => `${Number((100 * share).toPrecision(2))} %`;
    this.lines = [new Line(elements["running-line"]), new Line(elements["waiting-line"]), new Line(elements["kv-line"], percent, (share) => share)];
    this.shownRanks = "";
  }

  showState(state) {
    const element = this.elements.state;
    element.dataset.state = state;
    if (element.textContent !== STATES[state]) element.textContent = STATES[state];
  }

  /** The server does not answer: what was shown of it is over. */
  showGone() {
    this.showState("gone");
    const { running, waiting, kv, ranks } = this.elements;
    for (const element of [running, waiting, kv]) element.textContent = "–";
    for (const rank of ranks.querySelectorAll("li:not(.directory)")) {
      rank.className = "unknown";
      rank.title = STATES.gone;
    }
    this.shownRanks = "";
  }

  show(status) {
    const { model, method, version, running, waiting, kv } = this.elements;
    this.showState(status.state);
    model.textContent = status.model;
    method.textContent = tellMethod(status.speculation);
    version.textContent = `trtrun ${status.version}${status.restarts ? `, restarts of the engine: ${status.restarts}` : ""}`;
    const { queue } = status;
    const usage = status.kv_cache.usage;
    running.textContent = queue.running === null ? "–" : `${queue.running} of ${queue.max_running}`;
    waiting.textContent = queue.waiting === null ? "–" : `${queue.waiting} of ${queue.max_waiting}`;
    kv.textContent = usage === null ? "–" : `${(100 * usage).toFixed(1)} %`;
    this.lines[0].add(queue.running ?? 0, queue.max_running);
    this.lines[1].add(queue.waiting ?? 0, queue.max_waiting);
    this.lines[2].add(usage ?? 0, 1);
    this.showRanks(status);
  }

  showRanks(status) {
    const text = JSON.stringify([status.ranks, status.models, status.speculation]);
    if (text === this.shownRanks) return;
    this.shownRanks = text;
    const engines = ["orchestrator", "draft", "target"].map((role) => describeEngine(role, status));
    this.elements.ranks.replaceChildren(...engines.filter(Boolean));
  }
}

/** The last minute of a number, and what the top of its box stands for. */
export class Line {
  /**
   * @param tell how a number is written.
   * @param round what the top of the box may stand for: of counts, the next whole number.
   */
  constructor(svg, tell = String, round = Math.ceil) {
    this.svg = svg;
    this.tell = tell;
    this.round = round;
    this.values = [];
  }

  /** @param most the number's own limit: a line that fills its box is one that has reached it, if it is near. */
  add(value, most) {
    this.values.push(value);
    if (this.values.length > KEPT) this.values.shift();
    const scale = this.round(Math.min(most, 1.25 * Math.max(...this.values))) || most || 1;
    const { clientWidth, clientHeight: height } = this.svg;
    const width = clientWidth - SCALE_WIDTH;
    const x = (place) => (width * (place + KEPT - this.values.length)) / (KEPT - 1);
    const y = (number) => height - 1.5 - (height - 3) * Math.min(1, number / scale);
    const points = this.values.map((number, place) => `${x(place).toFixed(1)},${y(number).toFixed(1)}`);
    const path = `M${points.join("L")}`;
    const floor = `L${x(this.values.length - 1).toFixed(1)},${height}L${x(0).toFixed(1)},${height}Z`;
    const top = shape("text", { x: clientWidth, y: 9, "text-anchor": "end" });
    top.textContent = this.tell(scale);
    const bottom = shape("text", { x: clientWidth, y: height - 1, "text-anchor": "end" });
    bottom.textContent = "0";
    const ground = shape("line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 });
    this.svg.replaceChildren(ground, shape("path", { class: "area", d: path + floor }), shape("path", { d: path }), top, bottom);
  }
}

function tellMethod(speculation) {
  if (speculation.method === "none") return "plain decoding";
  const { method, draft_len, draft_nodes, drafts_in_parallel } = speculation;
  const isTree = draft_nodes > draft_len;
  const length = isTree
    ? `trees of up to ${draft_nodes} draft tokens a round, ${draft_len} deep`
    : `up to ${draft_len} draft tokens a round${drafts_in_parallel ? ", in one forward" : ""}`;
  return METHODS[method] ? `${METHODS[method]}, ${length}` : length;
}

/** One engine's line: its ranks, by device. */
function describeEngine(role, status) {
  const ranks = status.ranks.filter((rank) => rank.roles.includes(role));
  const box = document.createElement("div");
  box.className = "engine";
  const title = document.createElement("h3");
  title.textContent = role;
  box.append(title);
  if (!ranks.length) {
    if (status.speculation.method === "none") return null;
    const told = document.createElement("p");
    told.className = "quiet";
    told.textContent = `by the target's own ranks, ${SOURCES[status.speculation.method] ?? "with heads"}`;
    box.append(told, ...describeTree(role, status));
    return box;
  }
  const list = document.createElement("ul");
  list.setAttribute("aria-label", `${role} ranks`);
  list.append(...ranks.map(describeRank));
  box.append(list);
  const directory = status.models[role];
  if (directory) {
    const told = document.createElement("li");
    told.className = "directory quiet";
    const quantized = directory.quantization === "none" ? "" : `, ${directory.quantization}`;
    told.textContent = `model ${directory.name}${quantized}`;
    list.append(told);
  }
  box.append(...describeTree(role, status));
  return box;
}

/** The draft's tree, where its shape is known. */
function describeTree(role, status) {
  const parents = status.speculation.draft_parents;
  if (role !== "draft" || !parents) return [];
  const told = document.createElement("p");
  told.className = "quiet";
  told.textContent = `${countByDepth(parents).join(", ")} tokens by depth`;
  return [drawTree(parents), told];
}

function describeRank(rank) {
  const item = document.createElement("li");
  item.className = rank.state;
  const place = document.createElement("b");
  place.textContent = [rank.host, rank.device ?? (rank.host ? null : "host")].filter(Boolean).join(" ");
  item.append(place, `rank ${rank.rank}`);
  if (rank.state !== "up") item.title = rank.state;
  return item;
}
