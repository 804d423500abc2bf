"use strict";
// The samples of the page: searched, filtered and sorted as a whole, and drawn a screen at a time.
const data = JSON.parse(document.getElementById("samples").textContent);
const EACH = 20, LONGEST = 600, CUT = 10000;
const [TEXT, SCORES, KL, TOKENS, ENDED, CHANGES, TURNS] = [0, 1, 2, 3, 4, 5, 6];
const at = (name) => document.getElementById(name);
const number = (value, digits) => (value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(digits);
const signed = (value) => (value > 0 ? "+" : "") + number(value, 3);
let found = [], start = 0;

const texts = data.rows.map((row) => [row.prompt, ...row.responses.map((each) => each[TEXT])].join("\n").toLowerCase());

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function others() {
  const chosen = at("model").value;
  return chosen === "any" ? data.names.map((_, place) => place).slice(1) : [Number(chosen)];
}

// Of a row the change that it is sorted by: the largest either way of the models that are looked at, of the wanted sign.
function change(row, wanted) {
  const reward = Number(at("reward").value);
  const all = others().map((model) => row.responses[model][CHANGES][reward] ?? 0);
  if (wanted === "gain") return Math.max(...all);
  if (wanted === "loss") return Math.min(...all);
  return all.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
}

function kept(row, kind, least) {
  const value = change(row, kind);
  if (Math.abs(value) < least) return false;
  return kind === "all" || (kind === "gain" ? value > 0 : kind === "loss" ? value < 0 : value === 0);
}

function refresh() {
  const words = at("search").value.toLowerCase(), kind = at("kind").value, least = Number(at("least").value) || 0;
  const order = at("order").value, reward = Number(at("reward").value), model = others()[0];
  const keyed = [];
  data.rows.forEach((row, place) => {
    if ((!words || texts[place].includes(words)) && kept(row, kind, least)) {
      const keys = { change: -Math.abs(change(row, kind)), gain: -change(row, "gain"), loss: change(row, "loss"), prompt: place,
        score: -row.responses[model][SCORES][reward], kl: -row.responses[model][KL], length: -row.responses[model][TOKENS] };
      keyed.push([keys[order], place]);
    }
  });
  found = keyed.sort((one, other) => one[0] - other[0] || one[1] - other[1]).map((each) => each[1]);
  start = 0;
  draw();
}

// Which words of `ours` are not in the longest common subsequence with `theirs`. Words are what stands between spaces.
function changed(ours, theirs) {
  const [a, b] = [ours, theirs].map((text) => text.split(/\s+/).filter(Boolean));
  const gone = new Array(a.length).fill(true);
  if (a.length > LONGEST || b.length > LONGEST) {
    const known = new Set(b);
    return a.map((word) => !known.has(word));
  }
  const width = b.length + 1, longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { gone[i] = false; i++; j++; }
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return gone;
}

// A paragraph with its changed words marked. Of a long text its beginning, and a button for the rest.
function marked(text, other, name, most = CUT) {
  const made = element("p"), shown = text.slice(0, most), marks = changed(shown, other);
  let word = 0, plain = "";
  for (const part of shown.split(/(\s+)/)) {
    if (!part) continue;
    if (/^\s/.test(part) || !marks[word++]) plain += part;
    else {
      made.append(plain, element("mark", part, name));
      plain = "";
    }
  }
  made.append(plain);
  if (text.length > most) {
    const rest = element("button", `${(text.length - most).toLocaleString("en")} more characters`);
    rest.type = "button";
    rest.addEventListener("click", () => {
      const whole = marked(text, other, name, Infinity);
      made.replaceWith(whole);
      whole.tabIndex = -1;
      whole.focus({ preventScroll: true });
    });
    made.append(" \u2026 ", rest);
  }
  if (!text) made.append(element("small", "(an empty response)"));
  return made;
}

// What the policy itself said.
const own = (each) => each[TURNS] ? each[TURNS].filter((turn) => turn.by === "policy").map((turn) => turn.text).join("\n") : each[TEXT];

// The turns of a conversation. Words are marked in the policy's alone.
function conversation(turns, other, name) {
  const made = element("ol", undefined, "turns");
  for (const { by, text, reward } of turns) {
    const turn = element("li", undefined, by), head = element("small", reward ? `${by}, reward ${signed(reward)}` : by);
    turn.append(head, text ? marked(text, by === "policy" ? other : text, name) : element("p", "(no text)"));
    made.append(turn);
  }
  return made;
}

function response(row, model, shown) {
  const [text, scores, kl, tokens, ended, changes, turns] = row.responses[model], reward = Number(at("reward").value);
  const made = element("section"), head = element("h4", data.names[model]), first = own(row.responses[0]);
  made.style.setProperty("--c", `var(--c${model % 8})`);
  head.append(element("span", `${data.rewards[reward]} ${number(scores[reward], 3)}`));
  if (model && changes[reward] !== null) head.append(element("span", signed(changes[reward]), changes[reward] > 0 ? "gain" : changes[reward] < 0 ? "loss" : ""));
  data.rewards.forEach((name, place) => {
    if (place !== reward) head.append(element("span", `${name} ${number(scores[place], 3)}`));
  });
  if (model && kl !== null) head.append(element("span", `KL ${number(kl, 1)}`));
  head.append(element("span", `${tokens} tokens${ended ? "" : ", cut off"}`));
  const compared = model ? first : shown.length === 2 ? own(row.responses[shown[1]]) : first, name = model ? "" : "gone";
  made.append(head, turns ? conversation(turns, compared, name) : marked(text, compared, name));
  return made;
}

function draw() {
  const shown = [0, ...others()], list = document.createDocumentFragment();
  for (const place of found.slice(start, start + EACH)) {
    const row = data.rows[place], made = element("article"), head = element("h3", row.prompt);
    head.append(element("small", data.each > 1 ? `prompt ${row.place + 1}, sample ${row.number + 1}` : `prompt ${row.place + 1}`));
    made.tabIndex = -1;
    made.setAttribute("aria-label", `prompt ${row.place + 1}`);
    const side = element("div", undefined, "side");
    side.append(...shown.map((model) => response(row, model, shown)));
    made.append(head, side);
    list.append(made);
  }
  at("list").replaceChildren(list);
  const end = Math.min(start + EACH, found.length);
  const told = found.length ? `${start + 1} to ${end} of ${found.length.toLocaleString("en")}` : "no sample is like that";
  for (const name of ["told", "told-below"]) at(name).textContent = told;
  for (const button of document.querySelectorAll("nav button"))
    button.disabled = button.dataset.go === "-1" ? start === 0 : end >= found.length;
}

function go(by) {
  const next = start + by * EACH;
  if (next < 0 || next >= found.length) return;
  start = next;
  draw();
  at("list-of-samples").scrollIntoView();
  at("list").firstElementChild.focus({ preventScroll: true });
}

for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => go(Number(button.dataset.go)));
let waiting;
at("controls").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
at("controls").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (event.key === "/") { event.preventDefault(); at("search").focus(); }
  if (event.key === "n" || event.key === "p") go(event.key === "n" ? 1 : -1);
  if (event.key === "j" || event.key === "k") {
    const all = [...at("list").children], now = all.indexOf(document.activeElement.closest("article"));
    const next = all[event.key === "j" ? now + 1 : Math.max(now - 1, 0)];
    if (next) next.focus();
  }
});
refresh();
