// Tokens per second of two ways to the same text, and whether it is the same.

/** Times one text. The prompt's time is told apart: a second run finds the prompt's keys and values in place. */
export class Run {
  constructor() {
    this.began = performance.now();
    this.first = this.last = 0;
    this.numFirst = 0;
    this.tokens = [];
    this.isWhole = false;
    this.isInterrupted = false; // whether the engine was started again meanwhile, so that its speed says nothing
  }

  add(tokenIds) {
    if (!tokenIds.length) return;
    this.last = performance.now();
    if (!this.first) {
      this.first = this.last;
      this.numFirst = tokenIds.length;
    }
    for (const token of tokenIds) this.tokens.push(token);
  }

  /** Tokens per second behind the first ones; 0 as long as there is nothing to tell. */
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - this.numFirst) / seconds : 0;
  }

  get firstMilliseconds() {
    return this.first ? this.first - this.began : 0;
  }
}

export class SpeedView {
  constructor(section, verdict) {
    this.rows = {};
    for (const row of section.querySelectorAll("[data-run]")) {
      this.rows[row.dataset.run] = {
        number: row.querySelector("b"),
        bar: row.querySelector("i"),
        first: row.querySelector(".first"),
      };
    }
    this.verdict = verdict;
    this.runs = {};
  }

  /** Forget both runs: what is asked for has changed. */
  clear() {
    this.runs = {};
    this.show();
  }

  set(name, run) {
    this.runs[name] = run;
    this.show();
  }

  /** Whether both ways have written the text. */
  get isCompared() {
    return ["speculative", "plain"].every((name) => this.runs[name]?.isWhole);
  }

  show() {
    const fastest = Math.max(...Object.values(this.runs).map((run) => run.speed), 0);
    for (const [name, row] of Object.entries(this.rows)) {
      const run = this.runs[name];
      row.number.textContent = run && run.speed ? tell(run.speed) : "–";
      row.bar.style.width = run && fastest ? `${(100 * run.speed) / fastest}%` : "0";
      row.first.textContent = run && run.first ? tellFirst(run) : "";
    }
    this.verdict.replaceChildren(...this.judge());
  }

  judge() {
    const { speculative, plain } = this.runs;
    if (!speculative || !plain) return [];
    const parts = [];
    const isFair = !plain.isInterrupted && !speculative.isInterrupted;
    if (plain.isWhole && speculative.isWhole && plain.speed && speculative.speed && isFair) {
      const ratio = document.createElement("b");
      ratio.textContent = tellRatio(speculative.speed / plain.speed);
      parts.push(ratio, document.createElement("br"));
    }
    parts.push(this.compare(speculative, plain));
    return parts;
  }

  compare(speculative, plain) {
    const told = document.createElement("span");
    const length = Math.min(plain.tokens.length, speculative.tokens.length);
    let same = 0;
    while (same < length && plain.tokens[same] === speculative.tokens[same]) same += 1;
    const isOver = plain.isWhole && speculative.isWhole;
    if (same < length || (isOver && plain.tokens.length !== speculative.tokens.length)) {
      told.className = "differs";
      told.textContent = `The texts differ from token ${same + 1} on.`;
      if (this.isProbabilistic) {
        told.textContent += " With use_logits and a temperature they share a distribution, not the tokens.";
        told.className = "";
      }
    } else if (isOver) {
      told.className = "same";
      told.textContent = `The same text, token for token (${same}).`;
    } else {
      told.textContent = `The same so far: ${same} tokens.`;
    }
    return told;
  }
}

/** How much faster the first is: from twice on as a factor, below that in percent. */
function tellRatio(times) {
  const percent = Math.round(100 * Math.abs(times - 1));
  if (!percent) return "As fast as plain decoding";
  if (times < 1) return `${percent} % slower`;
  return times < 2 ? `${percent} % faster` : `${times.toFixed(2)} times as fast`;
}

function tellFirst(run) {
  const pause = run.isInterrupted ? "; the engine was started again meanwhile" : "";
  return `first token after ${Math.round(run.firstMilliseconds)} ms, ${run.tokens.length} in all${pause}`;
}

function tell(speed) {
  return speed >= 100 ? speed.toFixed(0) : speed.toFixed(1);
}
