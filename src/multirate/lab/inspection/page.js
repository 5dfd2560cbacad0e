"use strict";
// What is known of the token pointed at, and the choice of what colours the text.
const details = JSON.parse(document.getElementById("details").textContent);
const reader = document.getElementById("reader");
const panel = document.getElementById("token");
let chosen = null;
let kept = null;

function add(parent, tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  parent.append(made);
  return made;
}

// Spaces and line ends of a token are part of it.
function visible(text) {
  return text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "(nothing)";
}

// On a narrow page the panel lies over the lower half: the token is to stay in sight.
function open() {
  panel.classList.add("open");
  const over = getComputedStyle(panel).position === "fixed";
  if (over && chosen.getBoundingClientRect().bottom > panel.getBoundingClientRect().top) {
    chosen.scrollIntoView({ block: "start" });
  }
}

function close() {
  panel.classList.remove("open");
  if (kept) kept.focus();
}

function show(token) {
  if (token === chosen) return;
  if (chosen) chosen.classList.remove("chosen");
  chosen = token;
  chosen.classList.add("chosen");
  const of = details[token.dataset.text][token.dataset.i];
  panel.replaceChildren();
  panel.scrollTop = 0;
  const button = add(panel, "button", "✕", "close");
  button.setAttribute("aria-label", "Close");
  button.addEventListener("click", close);
  add(panel, "h4", visible(of.t));
  const facts = add(panel, "ul", undefined, "facts-of");
  add(facts, "li", `token ${Number(token.dataset.i) + 1}, id ${of.id}`);
  for (const fact of of.f) add(facts, "li", fact);
  for (const reading of of.r) {
    const fast = reading.n.startsWith("accelerated");
    const block = add(panel, "section", undefined, fast ? "accelerated" : "");
    add(block, "h5", reading.n);
    const scores = Object.entries(reading.s).map(([name, value]) => `${name} ${value.toFixed(3)}`);
    if (scores.length) add(block, "p", scores.join(" · "), "scores");
    const list = add(block, "ul");
    for (const [text, probability] of reading.c) {
      const line = add(list, "li", undefined, "candidate" + (text === of.t ? " is" : ""));
      add(line, "code", visible(text));
      const bar = add(line, "span", undefined, "bar");
      bar.setAttribute("aria-hidden", "true");
      add(bar, "i").style.width = `${100 * probability}%`;
      add(line, "b", `${(100 * probability).toFixed(1)}%`);
    }
  }
  open();
}

// The tab key goes to the text once; within it the arrow keys move.
function keep(token) {
  const before = token.parentElement.querySelector('[tabindex="0"]');
  if (before) before.tabIndex = -1;
  token.tabIndex = 0;
  kept = token;
  show(token);
}

// The token in the line above or below that is nearest to this one's place.
function beside(token, down) {
  const here = token.getClientRects()[0];
  let best = null;
  let least = Infinity;
  for (const other of token.parentElement.children) {
    const there = other.getClientRects()[0];
    const lines = there ? (there.top - here.top) * (down ? 1 : -1) : 0;
    if (lines < here.height / 2) continue;
    const distance = lines * 1000 + Math.abs(there.left - here.left);
    if (distance < least) [best, least] = [other, distance];
  }
  return best;
}

reader.addEventListener("mouseover", (event) => {
  const token = event.target.closest(".t");
  if (token) show(token);
});
reader.addEventListener("focusin", (event) => {
  const token = event.target.closest(".t");
  if (token) keep(token);
});
reader.addEventListener("click", (event) => {
  const token = event.target.closest(".t");
  if (!token) return;
  keep(token);
  open();
});
reader.addEventListener("keydown", (event) => {
  const token = event.target.closest(".t");
  if (!token) return;
  const siblings = token.parentElement.children;
  const next = {
    ArrowRight: () => token.nextElementSibling,
    ArrowLeft: () => token.previousElementSibling,
    ArrowDown: () => beside(token, true),
    ArrowUp: () => beside(token, false),
    Home: () => siblings[0],
    End: () => siblings[siblings.length - 1],
  }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open();
  } else if (next) {
    event.preventDefault();
    const found = next();
    if (found) found.focus();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") close();
});
document.querySelector(".by").addEventListener("change", (event) => {
  reader.dataset.by = event.target.value;
  for (const legend of reader.querySelectorAll(".legend")) {
    legend.hidden = legend.dataset.for !== event.target.value;
  }
});
