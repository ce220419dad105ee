"use strict";
// The page at /: every head of every model by hand. All texts are set as text, never as HTML.

const $ = (id) => document.getElementById(id);
const typed = {}; // by field: a text stays when another head is opened
let info = null;
let tab = null;
let running = null; // the AbortController of the request that is not answered yet

function make(tag, cls, text) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (text !== undefined) element.textContent = text;
  return element;
}

function card(title) {
  const made = make("div", "card");
  if (title) made.append(make("h3", "", title));
  $("result").append(made);
  return made;
}

function bar(name, share, number, best) {
  const made = make("div", best ? "bar best" : "bar");
  if (name !== null) made.append(make("span", "name", name));
  const track = make("span", "track");
  const filled = make("i");
  filled.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  track.append(filled);
  made.append(track, make("span", "number", number));
  return made;
}

const percent = (p) => `${(100 * p).toFixed(1)} %`;
const lines = (text) => text.split("\n").map((x) => x.trim()).filter(Boolean);
const code = (characters) => Array.from(characters); // offsets of the server count code points

async function call(path, body, signal) {
  const token = $("token").value;
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers };
  const answer = await fetch(path, options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const error = new Error(content.error ? content.error.message : `status ${answer.status}`);
    error.status = answer.status;
    throw error;
  }
  return content;
}

// ---- what can be tried ----

const SAMPLE = "The tower in Paris is 330 meters tall.";
// `short`: Enter runs; Shift + Enter begins another line
const field = (name, label, rows, value, short = false) => ({ name, label, rows, value, short });
/** A row from what was typed: fields left empty that may be are not in it. */
function rowOf(fields, values) {
  const given = fields.filter((each) => !each.optional || values[each.name].trim());
  return Object.fromEntries(given.map((each) =>
    [each.role, each.listed ? lines(values[each.name]) : each.parsed ? parsed(each, values[each.name]) : values[each.name]]));
}

function parsed(field, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${field.role}: ${text.trim() ? "not JSON" : "missing"}; expected ${field.label}`);
  }
}

function taskTab(model, task) {
  const { about, fields, shows } = task.form;
  return { id: `task-${model.name}-${task.name}`, name: task.name, model, task, kind: task.kind, about,
    fields: fields.map((each) => field(each.name, each.label, each.lines, each.value, each.short)),
    body: (v) => [`/predict/${encodeURIComponent(task.name)}`, { inputs: [rowOf(fields, v)], model: model.name }],
    show: { answer: showAnswer, choices: showChoices, spans: showSpans, text: showText }[shows] || showScores };
}

/** What a search may do besides comparing vectors, where it can. */
function switchesOf(search) {
  return [search.hybrid && { name: "hybrid", label: "by words, too" },
    search.rerank && { name: "rerank", label: "ordered again by a head" }].filter(Boolean);
}

function filterOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error('filter: not JSON; expected an object such as {"lang": "en"}');
  }
}

function tabsOf(model) {
  const found = model.tasks.map((task) => taskTab(model, task));
  if (info.search.texts) {
    found.unshift({ id: "search", name: "search", kind: `${info.search.texts} texts`, model,
      about: "The texts of the index that are nearest to yours.",
      fields: [field("query", "text", 2, "", true),
        ...(info.search.hybrid ? [field("filter", 'filter on metadata, such as {"lang": "en"}', 1, "", true)] : [])],
      switches: switchesOf(info.search),
      body: (v) => ["/search", { query: v.query, top: 10, hybrid: !!v.hybrid, rerank: !!v.rerank,
        ...(v.filter && v.filter.trim() ? { filter: filterOf(v.filter) } : {}) }],
      show: showHits });
  }
  if (model.fill_mask) {
    found.push({ id: "fill-mask", name: "fill-mask", kind: "masked words", model,
      about: "Guesses the words behind [MASK].",
      fields: [field("masked", "text with [MASK]", 3, "The capital of [MASK] is Paris.", true)],
      body: (v) => ["/fill-mask", { texts: [v.masked], top: 8, model: model.name }], show: showGuesses });
  }
  found.push({ id: "embed", name: "similar texts", kind: `${model.embedding.size} numbers`, model,
    about: "Orders texts by the cosine of their vectors to that of the first text.",
    fields: [field("query", "text", 2, SAMPLE, true),
      field("texts", "texts to compare, one on each line", 5, "A building in France.\nThe cat sat on the mat.\nIt is very high.")],
    body: (v) => ["/rerank", { query: v.query, documents: lines(v.texts), use: "vectors", model: model.name }],
    show: showNear });
  return found;
}

// ---- answers ----

/** A number or classes: what the prediction has, whatever the kind of the task; else all it has. */
function showScores(answer, values, tab) {
  const found = answer.predictions[0];
  const number = found.value ?? (found.probs === undefined ? found.score : undefined);
  if (number !== undefined) card(tab.name).append(make("p", "value", String(number)));
  else if (found.probs !== undefined) showClasses(found, tab);
  else Object.entries(found).forEach(([name, value]) =>
    card(name).append(make("p", "text", typeof value === "string" ? value : JSON.stringify(value))));
}

function showText(answer, values, tab) {
  card(tab.name).append(make("p", "text", answer.predictions[0].text || "(nothing)"));
}

function showClasses(found, tab) {
  const probs = Array.isArray(found.probs) ? found.probs : [found.probs];
  let names = tab.task.labels.length === probs.length ? tab.task.labels : probs.map((_, n) => String(n));
  if (probs.length === 1) names = ["match"];
  const chosen = found.labels ? new Set(found.labels.map(String)) : new Set([String(found.label)]);
  const made = card(found.labels ? "labels" : "class");
  probs.map((p, n) => [names[n], p]).sort((x, y) => y[1] - x[1]).slice(0, 30)
    .forEach(([name, p]) => made.append(bar(name, p, percent(p), chosen.has(name))));
  if (found.labels && !found.labels.length) made.append(make("p", "note", "no label is probable enough"));
}

function showChoices(answer, values) {
  const found = answer.predictions[0];
  const made = card("choices");
  const most = Math.max(...found.probs);
  lines(values.choices).forEach((choice, n) =>
    made.append(bar(choice, found.probs[n], percent(found.probs[n]), found.probs[n] === most)));
}

function marked(text, spans, decorate) {
  const characters = code(text);
  const made = make("p", "text");
  let at = 0;
  for (const span of [...spans].sort((x, y) => x.start - y.start)) {
    if (span.start < at) continue;
    made.append(characters.slice(at, span.start).join(""), decorate(characters.slice(span.start, span.end).join(""), span));
    at = span.end;
  }
  made.append(characters.slice(at).join(""));
  return made;
}

function showAnswer(answer, values) {
  const found = answer.predictions[0];
  const made = card("answer in its context");
  const spans = found.text && found.start >= 0 ? [{ start: found.start, end: found.start + code(found.text).length }] : [];
  made.append(marked(values.context, spans, (text) => make("mark", "", text)));
  if (!found.text) made.append(make("p", "note", "the context has no answer"));
  if (!found.n_best || !found.n_best.length) return;
  const best = card("best answers");
  found.n_best.slice(0, 8).forEach((each, n) => {
    const p = each.probability;
    best.append(bar(each.text || "(no answer)", p, percent(p), !n));
  });
}

function hue(name) {
  let number = 0;
  for (const character of name) number = (number * 31 + character.codePointAt(0)) % 360;
  return number;
}

function showSpans(answer, values) {
  const found = answer.predictions[0];
  const made = card("labeled spans");
  const label = (text, name) => {
    const span = make("span", "span", text);
    span.style.setProperty("--hue", hue(name));
    span.append(make("b", "", name));
    return span;
  };
  if (found.spans) {
    made.append(marked(values.text, found.spans, (text, span) => label(text, span.type)));
    if (!found.spans.length) made.append(make("p", "note", "no span found"));
    return;
  }
  const line = make("p", "text");
  (found.tokens || []).forEach((word, n) => line.append(label(word, found.tags[n]), " "));
  made.append(line);
}

function showGuesses(answer) {
  const record = answer.results[0];
  record.masks.forEach((mask, n) => {
    const made = card(record.masks.length > 1 ? `[MASK] ${n + 1}` : "[MASK]");
    mask.guesses.forEach((guess, k) => made.append(bar(guess.token, guess.probability, percent(guess.probability), !k)));
  });
}

/** `most`: the score of a whole bar. */
function hits(title, rows, most = 1) {
  const made = card(title);
  if (!rows.length) made.append(make("p", "note", "no text found"));
  for (const [text, score, heading, about] of rows) {
    const line = make("div", "hit");
    if (heading) line.append(make("b", "", heading));
    line.append(make("p", "text", text), bar(null, score / most, score.toFixed(3), false));
    if (about) line.append(make("small", "note", about));
    made.append(line);
  }
}

const metadataOf = (x) => Object.entries(x.metadata)
  .map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");

/** Cosines are shown as they are; other scores beside the best one. */
function showHits(answer, values) {
  const rows = answer.results.map((x) => [x.text, x.score, x.title, metadataOf(x)]);
  const best = Math.max(...answer.results.map((x) => x.score));
  hits("best texts", rows, (values.hybrid || values.rerank) && best > 0 ? best : 1);
}

function showNear(answer, values) {
  const texts = lines(values.texts);
  hits("the most similar first", answer.results.map((x) => [texts[x.index], x.relevance_score]));
}

// ---- the page ----

function cancel() {
  if (running) running.abort();
}

function clear() {
  $("result").replaceChildren();
  $("problem").hidden = $("raw").hidden = true;
  $("time").textContent = "";
}

function choose(chosen) {
  cancel();
  tab = chosen;
  clear();
  $("title").textContent = tab.name;
  $("about").textContent = tab.about;
  $("fields").replaceChildren(...tab.fields.map((each) => {
    const label = make("label", "field");
    label.append(make("span", "", each.label));
    const input = make("textarea");
    input.name = each.name;
    input.rows = each.rows;
    input.value = typed[each.name] ?? each.value;
    input.dataset.short = each.short ? "yes" : "";
    input.addEventListener("input", () => { typed[each.name] = input.value; });
    label.append(input);
    return label;
  }), ...(tab.switches || []).map((each) => {
    const label = make("label", "switch");
    const input = make("input");
    input.type = "checkbox";
    input.name = each.name;
    input.checked = !!typed[each.name];
    input.addEventListener("change", () => { typed[each.name] = input.checked; });
    label.append(input, ` ${each.label}`);
    return label;
  }));
  $("hint").textContent = tab.fields.some((each) => each.short) ? "Enter" : "Ctrl + Enter";
  for (const button of $("tabs").children) {
    button.toggleAttribute("aria-current", button.dataset.tab === tab.id);
  }
}

function showModel(name) {
  const model = info.models.find((each) => each.name === name);
  const tabs = tabsOf(model);
  $("tabs").replaceChildren(...tabs.map((each) => {
    const button = make("button", "", each.name);
    button.type = "button";
    button.dataset.tab = each.id;
    button.append(make("small", "", each.kind.replaceAll("_", " ")));
    button.addEventListener("click", () => choose(each));
    return button;
  }));
  choose(tabs[0]);
}

function fail(error) {
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

/** Shows that a request is computed, for how long, and how to cancel it. Returns what ends that. */
function showRunning() {
  const started = performance.now();
  const tick = () => { $("seconds").textContent = `${((performance.now() - started) / 1000).toFixed(1)} s`; };
  const timer = setInterval(tick, 100);
  tick();
  $("running").hidden = false;
  $("run").hidden = $("hint").hidden = true;
  $("result").setAttribute("aria-busy", "true");
  return () => {
    clearInterval(timer);
    $("running").hidden = true;
    $("run").hidden = $("hint").hidden = false;
    $("result").removeAttribute("aria-busy");
    return `${Math.round(performance.now() - started)} ms`;
  };
}

async function run(event) {
  event.preventDefault();
  if (running) return;
  const asked = tab;
  const values = Object.fromEntries(new FormData($("form")));
  for (const key in values) values[key] = values[key].replaceAll("\r\n", "\n");
  clear();
  const control = running = new AbortController();
  const ended = showRunning();
  try {
    const [path, body] = asked.body(values);
    const answer = await call(path, body, control.signal);
    $("time").textContent = ended();
    asked.show(answer, values, asked);
    if (answer.truncated) $("result").append(make("p", "note", "The text was too long for the model and was truncated."));
    $("request").textContent = `POST ${path}\n${JSON.stringify(body, null, 2)}`;
    $("answer").textContent = JSON.stringify(answer, null, 2);
    $("raw").hidden = false;
  } catch (error) {
    if (!control.signal.aborted) fail(error);
    else if (tab === asked) $("time").textContent = "cancelled";
  } finally {
    ended();
    running = null;
  }
}

async function load() {
  try {
    info = await call("/info");
  } catch (error) {
    $("token-field").hidden = error.status !== 401;
    fail(error);
    return;
  }
  $("problem").hidden = true;
  $("model").replaceChildren(...info.models.map((each) => make("option", "", each.name)));
  $("model-field").hidden = false;
  showModel(info.models[0].name);
}

$("form").addEventListener("submit", run);
$("form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return; // an input method's Enter chooses a word
  if (!event.ctrlKey && !event.metaKey && (event.shiftKey || !event.target.dataset.short)) return;
  event.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") cancel(); });
$("cancel").addEventListener("click", cancel);
$("model").addEventListener("change", () => showModel($("model").value));
$("token").addEventListener("change", load);
load();
