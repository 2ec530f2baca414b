// A chat with the API of this origin. Text goes from this page to the API and nowhere else, and is kept in this page only.
// A stream may stall or break: what has come stays, and "Go on" has the model continue from there.

const QUIET_MS = 15000;

const chat = document.getElementById("chat");
const settings = document.getElementById("settings");
const ask = document.getElementById("ask");
const turns = document.getElementById("turns");
const state = document.getElementById("chat-state");
const stop = document.getElementById("stop");
const again = document.getElementById("again");
const api = chat.dataset.api;

const messages = []; // {role, content}, as the API takes them
let running = null; // the AbortController of an answer that is coming

class Refusal extends Error {}

function field(name) {
  return settings.elements[name];
}

function headers() {
  const key = field("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function explain(answer) {
  if (answer.status === 401) {
    document.getElementById("key-field").hidden = false;
    field("key").focus();
    return "The API wants a key: give it above, and ask again.";
  }
  try {
    const told = await answer.json();
    return told.error?.message ?? told.message ?? `The API answered ${answer.status}.`;
  } catch {
    return `The API answered ${answer.status}.`;
  }
}

async function loadModels() {
  try {
    const answer = await fetch(`${api}/models`, { headers: headers() });
    if (!answer.ok) throw new Refusal(await explain(answer));
    const models = (await answer.json()).data.map((model) => model.id);
    field("model").replaceChildren(...models.map((id) => new Option(id, id)));
    say(models.length ? "" : "No box serves a model yet.");
  } catch (error) {
    say(error instanceof Refusal ? error.message : "The API cannot be reached from here.");
  }
}

function say(text) {
  state.textContent = text;
}

function addTurn(role) {
  const turn = document.createElement("li");
  turn.className = role;
  turn.setAttribute("aria-label", role === "user" ? "You" : "Model");
  turns.append(turn);
  return turn;
}

// Text is only ever text; what stands between ``` is shown as code.
function show(turn, text) {
  const parts = text.split(/^```[^\n]*\n?/m).map((part, number) => {
    if (number % 2 === 0) return document.createTextNode(part);
    const code = document.createElement("pre");
    code.textContent = part;
    return code;
  });
  turn.replaceChildren(...parts);
}

// The events of a stream, as their data comes; a line may come in pieces.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

function request(going) {
  return {
    model: field("model").value,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(field("max_tokens").value) || 512,
    temperature: Number(field("temperature").value),
    ...(going && { continue_final_message: true, add_generation_prompt: false }),
  };
}

// Reads an answer to its end into `message`. Returns whether it came to one.
async function read(answer, message, turn, figures) {
  let quiet = 0;
  const hush = () => {
    clearTimeout(quiet);
    quiet = setTimeout(() => say("Nothing has come for a while; still waiting. Stop keeps what is there."), QUIET_MS);
  };
  hush();
  let drawing = 0;
  try {
    for await (const data of events(answer.body)) {
      hush();
      if (data === "[DONE]") return true;
      const told = JSON.parse(data);
      if (told.error) throw new Refusal(told.error.message);
      figures.tokens = told.usage?.completion_tokens ?? figures.tokens;
      const text = told.choices?.[0]?.delta?.content;
      if (!text) continue;
      if (state.textContent) say("");
      figures.first ??= performance.now();
      message.content += text;
      drawing ||= requestAnimationFrame(() => {
        drawing = 0;
        show(turn, message.content);
      });
    }
    return false; // it ended without saying so
  } finally {
    clearTimeout(quiet);
    cancelAnimationFrame(drawing);
    show(turn, message.content);
  }
}

function tell(turn, answer, figures) {
  const ended = performance.now();
  const seconds = (ended - figures.first) / 1000;
  const [prefill, decode] = ["x-p2p-prefill-node", "x-p2p-decode-node"].map((name) => answer.headers.get(name));
  const parts = [
    figures.first && `first token ${Math.round(figures.first - figures.begun)} ms`,
    figures.tokens > 1 && seconds > 0 && `${figures.tokens} tokens, ${((figures.tokens - 1) / seconds).toFixed(1)} per second`,
    decode && (prefill && prefill !== decode ? `prefill ${prefill}, decode ${decode}` : decode),
  ].filter(Boolean);
  const line = document.createElement("span");
  line.className = "figures";
  line.textContent = parts.join(" · ");
  turn.append(line);
}

async function answerNow(going) {
  const turn = going ? turns.lastElementChild : addTurn("assistant");
  const message = going ? messages.at(-1) : { role: "assistant", content: "" };
  const figures = { begun: performance.now(), first: undefined, tokens: 0 };
  const body = JSON.stringify(request(going));
  if (!going) messages.push(message);
  running = new AbortController();
  setRunning(true);
  say("Waiting for the first token.");
  let whole = false;
  try {
    const answer = await fetch(`${api}/chat/completions`, { method: "POST", headers: headers(), body, signal: running.signal });
    if (!answer.ok) throw new Refusal(await explain(answer));
    whole = await read(answer, message, turn, figures);
    say(whole ? "" : "The connection ended before the answer did. Go on continues it.");
    if (whole) tell(turn, answer, figures);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else if (error instanceof Refusal) say(error.message);
    else say("The connection was lost. What has come is kept; Go on continues it.");
  } finally {
    running = null;
    if (!message.content) {
      messages.pop();
      turn.remove();
    }
    setRunning(false);
    again.hidden = whole || !messages.length;
    again.textContent = messages.at(-1)?.role === "user" ? "Ask again" : "Go on";
  }
}

function setRunning(on) {
  ask.querySelector("[type=submit]").disabled = on;
  stop.hidden = !on;
  if (on) again.hidden = true;
  turns.setAttribute("aria-busy", String(on));
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = ask.elements.question.value.trim();
  if (!text || running) return;
  if (messages.at(-1)?.role === "user") messages.pop(); // it was not answered, and is asked in other words
  messages.push({ role: "user", content: text });
  show(addTurn("user"), text);
  ask.elements.question.value = "";
  answerNow(false);
});
ask.elements.question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask.requestSubmit();
  }
});
stop.addEventListener("click", () => running?.abort());
again.addEventListener("click", () => answerNow(messages.at(-1)?.role === "assistant"));
document.getElementById("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  turns.replaceChildren();
  again.hidden = true;
  say("");
});
settings.addEventListener("submit", (event) => event.preventDefault());
field("key").addEventListener("change", loadModels);

loadModels();
