// The conversation: its turns, and the request that answers the newest one.

import { chat } from "./api.js";
import { rendered } from "./markdown.js";
import { Recording, shownRate } from "./recording.js";

const EXAMPLES = [
  "Why is the sky blue?",
  "Write a short story about a fox who learns to share.",
  "Write a Python function that counts the words of a text.",
];
const ENDS = { length: "Ended at the maximum of new tokens.", stopped: "Stopped." };

function made(name, type, text = "") {
  const found = document.createElement(name);
  found.className = type;
  found.textContent = text;
  return found;
}

/** A question and its answer, on the page. */
class Turn {
  answer = "";
  thought = "";

  constructor(question, log) {
    this.question = question;
    this.element = made("div", "turn");
    this.said = made("article", "answer");
    this.said.setAttribute("aria-label", "Answer");
    this.thinking = made("details", "thought");
    this.thinking.hidden = true;
    this.words = made("p", "");
    this.thinking.append(made("summary", "", "Thought"), this.words);
    this.body = made("div", "body");
    this.foot = made("p", "foot quiet");
    this.said.append(this.thinking, this.body, this.foot);
    const asked = made("article", "question", question);
    asked.setAttribute("aria-label", "Question");
    this.element.append(asked, this.said);
    log.append(this.element);
  }

  begin() {
    this.answer = this.thought = "";
    this.said.hidden = false;
    this.said.setAttribute("aria-busy", "true");
    this.body.replaceChildren(made("p", "quiet", "Reading the question …"));
    this.foot.textContent = "";
    this.element.querySelector(".error")?.remove();
  }

  add(delta) {
    this.answer += delta.content ?? "";
    this.thought += delta.reasoning_content ?? "";
  }

  show(recording, note = "") {
    this.thinking.hidden = !this.thought;
    this.words.textContent = this.thought;
    if (this.answer || this.thought || note) this.body.replaceChildren(rendered(this.answer));
    const count = recording.pieces.length;
    const counted = count ? `${count} token${count === 1 ? "" : "s"}` : "";
    const rate = recording.finish ? recording.rate : recording.rateOf(count);
    this.foot.textContent = [[counted, shownRate(rate)].filter(Boolean).join(", "), note].filter(Boolean).join(". ");
  }

  fail(message, again) {
    this.said.hidden = !this.answer && !this.thought;
    const found = made("div", "error");
    found.setAttribute("role", "alert");
    const button = made("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", again);
    found.append(made("p", "", message), button);
    this.element.append(found);
  }
}

/** options() gives {system, fields}; onStart(body, recording), onTokens(), onEnd(recording, complete) tell
 *  what happens; onFailure(error) is told of a refusal. */
export class Chat {
  constructor(log, status, handlers) {
    this.log = log;
    this.status = status;
    this.handlers = handlers;
    this.turns = [];
    this.request = null;
    this.clear();
  }

  get busy() {
    return this.request !== null;
  }

  clear() {
    this.stop();
    this.turns = [];
    this.status.textContent = "";
    const hello = made("div", "hello");
    hello.append(made("p", "", "Ask a question, or take one of these:"));
    for (const example of EXAMPLES) {
      const button = made("button", "", example);
      button.type = "button";
      button.addEventListener("click", () => this.send(example));
      hello.append(button);
    }
    this.log.replaceChildren(hello);
  }

  stop() {
    this.request?.abort();
  }

  async send(question) {
    if (this.busy || !question.trim()) return;
    if (!this.turns.length) this.log.replaceChildren();
    const turn = new Turn(question, this.log);
    this.turns.push(turn);
    await this.run(turn);
  }

  messages(turn) {
    const { system } = this.handlers.options();
    const found = system ? [{ role: "system", content: system }] : [];
    for (const one of this.turns) {
      if (one === turn) break;
      if (!one.answer) continue; // it failed, and models expect turns to alternate
      found.push({ role: "user", content: one.question }, { role: "assistant", content: one.answer });
    }
    return [...found, { role: "user", content: turn.question }];
  }

  async run(turn) {
    if (this.busy) return;
    const request = (this.request = new AbortController());
    const recording = new Recording();
    // The race repeats the request, also its random numbers.
    const seed = Math.floor(Math.random() * 2 ** 31);
    const body = { messages: this.messages(turn), seed, ...this.handlers.options().fields };
    turn.begin();
    this.status.textContent = "Answering";
    this.follow(true);
    this.handlers.onStart(body, recording);
    let painting = 0;
    try {
      for await (const chunk of chat(body, request.signal)) {
        recording.add(chunk);
        if (chunk.choices[0]) turn.add(chunk.choices[0].delta);
        if (request.signal.aborted) break;
        this.handlers.onTokens();
        painting ||= requestAnimationFrame(() => {
          painting = 0;
          this.follow(false, () => turn.show(recording));
        });
      }
      this.end(turn, recording, ENDS[request.signal.aborted ? "stopped" : recording.finish]);
    } catch (error) {
      if (error.name === "AbortError") {
        this.end(turn, recording, ENDS.stopped);
      } else {
        this.end(turn, recording, "");
        turn.fail(error.message, () => this.run(turn));
        this.follow(true);
        this.handlers.onFailure(error);
      }
    } finally {
      cancelAnimationFrame(painting);
      if (this.request === request) this.request = null;
      this.handlers.onEnd(recording, recording.finish !== null && !request.signal.aborted);
    }
  }

  end(turn, recording, note) {
    turn.said.removeAttribute("aria-busy");
    this.follow(false, () => turn.show(recording, note || undefined));
    if (!turn.answer && !turn.thought) turn.body.replaceChildren();
    if (this.turns.includes(turn)) this.status.textContent = turn.answer || note || "";
  }

  /** Changes the log and stays at its end, if the reader is there, or in any case. */
  follow(always, change = () => {}) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    change();
    if (always || atEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
