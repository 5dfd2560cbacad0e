// Puts the page together.

import { Failure, aboutServer, checkKey, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { drawAcceptance, drawLoad } from "./charts.js";
import { Monitor } from "./monitor.js";
import { Race } from "./race.js";

const byId = (name) => document.getElementById(name);
const DEFAULT_TOKENS = 1024;

function theme() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const show = () => byId("theme").setAttribute("aria-pressed", dark());
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("multirate-theme", root.dataset.theme);
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

/** On a narrow screen one part is seen at a time. */
function views() {
  const buttons = document.querySelectorAll("[data-show]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const one of buttons) one.setAttribute("aria-pressed", one === button);
      draw();
    });
  }
}

/** Fields whose values last until the reader changes them. */
function remembered(...names) {
  for (const name of names) {
    const field = byId(name);
    const key = `multirate-${name}`;
    const saved = localStorage.getItem(key);
    const property = field.type === "checkbox" ? "checked" : "value";
    if (saved !== null) field[property] = JSON.parse(saved);
    field.addEventListener("change", () => localStorage.setItem(key, JSON.stringify(field[property])));
  }
}

function options() {
  const fields = {};
  if (byId("temperature").value) fields.temperature = Number(byId("temperature").value);
  if (byId("max-tokens").value) fields.max_tokens = Number(byId("max-tokens").value);
  return { system: byId("system").value.trim(), fields };
}

function askForKey(message) {
  byId("key-form").hidden = false;
  byId("key-note").classList.toggle("wrong", Boolean(message));
  if (message) byId("key-note").textContent = message;
  byId("key").focus();
}

async function useKey(event) {
  event.preventDefault();
  setKey(byId("key").value);
  try {
    await checkKey();
    byId("key-form").hidden = true;
    byId("question").focus();
  } catch (error) {
    askForKey(error.message);
  }
}

function showServerState(text) {
  if (byId("server-state").textContent !== text) byId("server-state").textContent = text;
}

const monitor = new Monitor(
  () => {
    showServerState("");
    draw();
  },
  () => showServerState("unreachable"),
);

function draw() {
  if (!monitor.samples.length || !byId("load").clientWidth) return;
  drawAcceptance(monitor.samples.at(-1));
  drawLoad(monitor.samples);
}

const race = new Race(showState, (at) => monitor.othersSince(at));

const chat = new Chat(byId("log"), byId("said"), {
  options,
  onStart(body, recording) {
    race.begin(body, recording);
    showState();
    // The button that was clicked may be gone. The log, as a text field would open a phone's keyboard.
    if (document.activeElement === document.body) byId("log").focus();
  },
  onTokens: () => race.grow(),
  onEnd(recording, complete) {
    race.end(recording, complete);
    showState();
    if (complete && byId("each").checked) race.run(); // does nothing if it is not ready;
  },
  onFailure(error) {
    if (error.status === 401) askForKey(error.message);
  },
});

function showState() {
  const { busy } = chat;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("start").textContent = race.running ? "Stop" : "Race";
  byId("start").disabled = !(race.ready || race.running);
  byId("replay").disabled = !race.replayable;
}

function send() {
  if (chat.busy || !byId("question").value.trim()) return;
  if (!byId("composer").checkValidity()) byId("settings").open = true; // so that the wrong field is seen
  if (!byId("composer").reportValidity()) return;
  chat.send(byId("question").value.trim());
  byId("question").value = "";
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    chat.stop();
    race.stop();
  });
  byId("stop").addEventListener("click", () => {
    chat.stop();
    byId("question").focus();
  });
  byId("new-chat").addEventListener("click", () => {
    chat.clear();
    race.clear();
    byId("question").focus();
  });
  byId("start").addEventListener("click", () => (race.running ? race.stop() : race.run()));
  byId("replay").addEventListener("click", () => race.replay());
  byId("key-form").addEventListener("submit", useKey);
  new ResizeObserver(draw).observe(byId("load"));
}

async function about() {
  let server;
  try {
    server = await aboutServer();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    showServerState("unreachable");
    return;
  }
  byId("model-name").textContent = server.model;
  document.title = `${server.model} – multirate`;
  byId("method-name").textContent = server.method ?? "nobody";
  byId("drafted-title").textContent = server.method ? `With ${server.method}` : "Without drafts";
  if (!server.method) {
    byId("race-how").textContent = "This server decodes without drafts, so there is nothing to race against.";
    race.possible = false;
    byId("each-label").hidden = true;
  }
  const most = server.max_tokens ?? server.context ?? "";
  byId("max-tokens").max = most;
  if (localStorage.getItem("multirate-max-tokens") === null) {
    byId("max-tokens").value = Math.min(DEFAULT_TOKENS, most || DEFAULT_TOKENS);
  }
  if (server.needs_key && !hasKey()) askForKey();
}

theme();
views();
byId("each").checked = true;
remembered("system", "temperature", "max-tokens", "each");
listen();
showState();
about();
monitor.run();
