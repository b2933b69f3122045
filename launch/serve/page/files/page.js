// The page's parts, joined: what is asked for, and where the answer goes.

import { ApiError, status, stream, useKey } from "./api.js";
import { EngineView } from "./engine.js";
import { RoundPlot } from "./plot.js";
import { Run, SpeedView } from "./speeds.js";
import { Legend, Rounds, TokenView } from "./tokens.js";

const IDLE_MILLISECONDS = 1000;
const BUSY_MILLISECONDS = 400;

const elements = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
const engine = new EngineView(elements);
const legend = new Legend(elements.legend);
const tokens = new TokenView(elements.text);
const plot = new RoundPlot(elements.plot, elements["round-hint"], (first, end) => tokens.mark(first, end));
const speeds = new SpeedView(document.querySelector(".speeds"), elements.verdict);

let server = null; // the last status
let asked = null; // what the text on the page was asked for with
let isWhole = false; // whether that text is there to its end
let stopping = null; // of the request in work
let needsKey = false; // whether the server has refused to answer without one

// What is asked for.

/** The fields of a request, from the form. */
function readForm() {
  const temperature = Number(elements.temperature.value);
  const prompt = elements.prompt.value;
  const isChat = new FormData(elements.ask).get("kind") === "chat";
  const seed = elements.seed.value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(elements.seed.value);
  return {
    path: isChat ? "v1/chat/completions" : "v1/completions",
    echo: isChat ? "" : prompt,
    isSpeculative: elements.speculation.checked,
    body: {
      model: server.model,
      ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      temperature,
      max_tokens: Number(elements["max-tokens"].value),
      draft_len: elements.speculation.checked ? Number(elements["draft-len"].value) : 0,
      // Drawn here where none is given: plain decoding is compared with the same one.
      seed,
      return_token_ids: true,
      return_token_texts: true,
      return_token_origins: true,
    },
  };
}

/** Stream one text; returns its run, and what speculation did for it. Rejects with what ended it. */
async function decode(request, onTokens) {
  let speculation = null;
  stopping = new AbortController();
  setBusy(true);
  try {
    const restarts = await countRestarts();
    const run = new Run();
    for await (const event of stream(request.path, request.body, stopping.signal)) {
      const [choice] = event.choices;
      if (event.metrics) speculation = event.metrics.speculative_decoding;
      if (!choice || !choice.token_ids.length) continue;
      run.add(choice.token_ids);
      onTokens(run, choice);
    }
    run.isWhole = true;
    run.isInterrupted = (await countRestarts()) !== restarts;
    return { run, speculation };
  } finally {
    stopping = null;
    setBusy(false);
  }
}

/** How often the engine has been started again. It is asked for: a page that is hidden does not watch the server. */
async function countRestarts() {
  try {
    return (await status()).restarts;
  } catch {
    return server.restarts; // as it was last known
  }
}

async function generate() {
  if (stopping || !server || !elements.ask.reportValidity()) return;
  asked = readForm();
  isWhole = false;
  showProblem("");
  speeds.clear();
  speeds.isProbabilistic = server.speculation.use_logits && asked.body.temperature > 0;
  tokens.begin(asked.echo);
  const rounds = new Rounds();
  legend.show(rounds.counts);
  plot.show(rounds.list, server.speculation.draft_len);
  showAcceptance(rounds, null);
  elements.news.textContent = "";
  const name = asked.isSpeculative && server.speculation.method !== "none" ? "speculative" : "plain";
  await guarded(async () => {
    const { run, speculation } = await decode(asked, (run, choice) => {
      choice.token_texts.forEach((text, place) => {
        const origin = choice.token_origins[place];
        tokens.add(text, origin, rounds.add(origin));
      });
      legend.show(rounds.counts);
      plot.show(rounds.list, server.speculation.draft_len);
      speeds.set(name, run);
      showAcceptance(rounds, null);
    });
    speeds.set(name, run);
    showAcceptance(rounds, speculation);
    isWhole = true;
    setBusy(false);
    const share = speculation && speculation.num_draft_tokens ? `, ${percent(speculation.draft_acceptance_rate)} of the draft tokens accepted` : "";
    elements.news.textContent = `Done: ${run.tokens.length} tokens, ${Math.round(run.speed)} per second${share}.`;
  });
}

/** The same request without drafts, beside the text that is there. */
async function compare() {
  if (stopping || !asked) return;
  showProblem("");
  const plain = { ...asked, body: { ...asked.body, draft_len: 0 } };
  await guarded(async () => {
    const { run } = await decode(plain, (run) => speeds.set("plain", run));
    speeds.set("plain", run);
    elements.news.textContent = elements.verdict.innerText;
  });
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error instanceof ApiError && error.status === 401) askForKey(error);
    else showProblem(error instanceof ApiError ? error.message : "The server does not answer.");
  }
}

// What is shown.

function showAcceptance(rounds, speculation) {
  // Of all rounds, those without drafts too, so that it goes with the number of rounds and of tokens.
  elements["acceptance-length"].textContent = rounds.list.length ? rounds.meanTokens().toFixed(2) : "–";
  elements["acceptance-rate"].textContent =
    speculation && speculation.num_draft_tokens ? percent(speculation.draft_acceptance_rate) : "–";
  elements["round-count"].textContent = rounds.list.length ? String(rounds.list.length) : "–";
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function setBusy(isBusy) {
  elements.go.disabled = isBusy;
  elements.stop.disabled = !isBusy;
  elements.compare.textContent = speeds.isCompared ? "Decode plainly again" : "Decode plainly and compare";
  elements.compare.disabled = isBusy || !isWhole || !asked.isSpeculative || server.speculation.method === "none";
  elements.text.setAttribute("aria-busy", String(isBusy));
}

function showProblem(text) {
  elements.problem.textContent = text;
  elements.problem.hidden = !text;
}

function askForKey(error) {
  needsKey = true;
  const isNew = elements["key-bar"].hidden;
  elements["key-bar"].hidden = false;
  if (isNew) elements.key.focus();
  else if (elements.key.value) showProblem(error.message);
}

/** Give the form the limits that the server has. */
function fitForm(status) {
  const longest = status.speculation.draft_len;
  const slider = elements["draft-len"];
  if (!server || server.speculation.draft_len !== longest || server.chat !== status.chat) {
    slider.max = Math.max(1, longest);
    slider.value = longest;
    const canDraft = longest > 0;
    elements.speculation.checked = canDraft;
    elements.speculation.disabled = !canDraft;
    const chat = elements["chat-choice"];
    chat.querySelector("input").disabled = !status.chat;
    elements["chat-hint"].hidden = status.chat;
  }
  if (!server || server.chat !== status.chat) {
    // Who has a model for chats seldom wants its prompts gone on with.
    elements.ask.querySelector(`[name=kind][value=${status.chat ? "chat" : "completion"}]`).checked = true;
  }
  const most = elements["max-tokens"];
  if (status.max_seq_len && Number(most.max) !== status.max_seq_len) {
    most.max = status.max_seq_len;
    most.value = Math.min(Number(most.value), status.max_seq_len);
  }
  server = status;
  showSettings();
}

function showSettings() {
  elements["draft-len"].disabled = !elements.speculation.checked;
  elements["draft-len-value"].textContent = elements.speculation.checked ? elements["draft-len"].value : "";
  const temperature = Number(elements.temperature.value);
  elements["temperature-value"].textContent = temperature ? temperature.toFixed(1) : "0, greedy";
}

// How the server stands, as long as somebody looks.

async function watch() {
  if (document.visibilityState === "visible" && !needsKey) {
    try {
      const answer = await status();
      fitForm(answer);
      engine.show(answer);
      elements["key-bar"].hidden = true;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) askForKey(error);
      else engine.showGone();
    }
  }
  setTimeout(watch, stopping ? BUSY_MILLISECONDS : IDLE_MILLISECONDS);
}

// Where there is one column, the speeds and what compares them stand under the text; in the order of the keyboard, too.

const narrow = matchMedia("(max-width: 900px)");

function placeSpeeds() {
  if (narrow.matches) elements["text-card"].after(elements["speed-card"]);
  else elements.aside.prepend(elements["speed-card"]);
}

narrow.addEventListener("change", placeSpeeds);
placeSpeeds();

// Colours: the system's, or the one chosen here.

const THEMES = ["auto", "light", "dark"];
let theme = "auto";
try {
  theme = localStorage.getItem("trtrun-theme") ?? "auto";
} catch {
  // This browser keeps nothing for pages: the system's colours, then.
}

function showTheme() {
  document.documentElement.dataset.theme = theme;
  elements.theme.textContent = theme[0].toUpperCase() + theme.slice(1);
  elements.theme.setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system has them" : theme}`);
}

elements.theme.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  showTheme();
  try {
    localStorage.setItem("trtrun-theme", theme);
  } catch {
    // Then it holds until the page is closed.
  }
});

elements.ask.addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
elements.ask.addEventListener("input", showSettings);
elements.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopping?.abort();
});
elements.stop.addEventListener("click", () => stopping?.abort());
elements.compare.addEventListener("click", compare);
elements["key-bar"].addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(elements.key.value.trim());
  needsKey = false;
  showProblem("");
});

showTheme();
showSettings();
watch();
