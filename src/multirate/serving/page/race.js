// The same question with and without drafts: the chat's answer, then plain decoding beside a replay.

import { chat } from "./api.js";
import { Recording, shownRate } from "./recording.js";

const TICK = 33; // milliseconds between two pictures of a replay

/** Where one answer's tokens are shown. */
class Lane {
  constructor(name) {
    this.text = document.getElementById(`${name}-text`);
    this.rate = document.getElementById(`${name}-rate`);
    this.shown = 0;
  }

  clear(hint = "") {
    this.shown = 0;
    this.text.replaceChildren();
    this.text.dataset.hint = hint;
    this.rate.textContent = "";
  }

  /** Shows a recording's first `count` tokens. */
  show(recording, count) {
    if (count <= this.shown) return;
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    for (const piece of recording.pieces.slice(this.shown, count)) {
      const span = document.createElement("span");
      span.className = `o-${piece.origin}`;
      span.textContent = piece.text;
      this.text.append(span);
    }
    this.shown = count;
    this.rate.textContent = shownRate(recording.rateOf(count));
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  finish(recording) {
    this.show(recording, recording.pieces.length);
    this.rate.textContent = shownRate(recording.rate);
  }
}

/** onState() is called when `running` or `ready` may have changed; othersSince(at) tells whether other
 *  requests have run since performance.now() was `at`. */
export class Race {
  body = null;
  drafted = null;
  plain = null;
  request = null;
  complete = false;
  possible = true;
  onState = () => {};

  constructor(onState, othersSince) {
    this.lanes = { drafted: new Lane("drafted"), plain: new Lane("plain") };
    this.othersSince = othersSince;
    this.result = document.getElementById("result");
    this.clear();
    this.onState = onState;
  }

  get running() {
    return this.request !== null;
  }

  /** Whether there is an answer to race against. */
  get ready() {
    return this.possible && this.complete && !this.running;
  }

  get replayable() {
    return this.ready && this.plain !== null;
  }

  clear() {
    this.stop();
    this.request = null;
    this.body = this.drafted = this.plain = null;
    this.complete = false;
    this.lanes.drafted.clear("The answer to your question appears here as it is decoded.");
    this.lanes.plain.clear("Then the same question is answered here without drafts.");
    this.result.textContent = "";
    this.count();
    this.onState();
  }

  /** A chat's request begins. */
  begin(body, recording) {
    this.clear();
    this.body = body;
    this.drafted = recording;
    this.started = performance.now();
    this.lanes.drafted.clear();
  }

  /** The chat's recording has grown. */
  grow() {
    this.lanes.drafted.show(this.drafted, this.drafted.pieces.length);
    this.count();
  }

  /** The chat's answer has ended. */
  end(recording, complete) {
    if (recording !== this.drafted) return;
    this.complete = complete && this.drafted.pieces.length > 0;
    if (this.complete) this.lanes.drafted.finish(this.drafted);
    this.count();
    this.onState();
  }

  stop() {
    this.request?.abort();
  }

  async run() {
    if (!this.ready) return;
    const request = (this.request = new AbortController());
    const plain = (this.plain = new Recording());
    const drafted = this.drafted;
    this.result.textContent = "";
    this.lanes.plain.clear();
    this.onState();
    try {
      const body = { ...this.body, speculative: { method: "none" } };
      let replay = null;
      for await (const chunk of chat(body, request.signal)) {
        plain.add(chunk);
        if (plain.began !== null) replay ??= this.replayed(this.lanes.drafted, drafted, request.signal);
        this.lanes.plain.show(plain, plain.pieces.length);
      }
      this.lanes.plain.finish(plain);
      await replay;
      if (this.request === request) {
        this.lanes.drafted.finish(drafted);
        this.tell();
      }
    } catch (error) {
      if (this.plain === plain) this.plain = null;
      if (this.request === request) {
        this.lanes.drafted.finish(drafted);
        this.result.textContent = error.name === "AbortError" ? "The race was stopped." : error.message;
      }
    } finally {
      if (this.request === request) this.request = null;
      this.onState();
    }
  }

  /** Shows both answers again. */
  async replay() {
    if (!this.replayable) return;
    const request = (this.request = new AbortController());
    const { lanes, drafted, plain } = this;
    this.onState();
    await Promise.all([
      this.replayed(lanes.drafted, drafted, request.signal),
      this.replayed(lanes.plain, plain, request.signal),
    ]);
    if (this.request === request) {
      lanes.drafted.finish(drafted);
      lanes.plain.finish(plain);
      this.request = null;
    }
    this.onState();
  }

  /** Shows a recording at its own pace. */
  async replayed(lane, recording, signal) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return lane.finish(recording);
    const began = performance.now();
    lane.clear();
    while (lane.shown < recording.pieces.length && !signal.aborted) {
      lane.show(recording, recording.countAt(performance.now() - began));
      await new Promise((resolve) => setTimeout(resolve, TICK));
    }
    if (!signal.aborted) lane.finish(recording);
  }

  count() {
    for (const origin of ["model", "draft", "text"]) {
      const pieces = this.drafted?.pieces ?? [];
      const count = pieces.filter((piece) => piece.origin === origin).length;
      document.getElementById(`count-${origin}`).textContent = pieces.length ? count : "";
    }
  }

  tell() {
    const { drafted, plain } = this;
    const times = (drafted.rate / plain.rate).toFixed(2);
    const alike = common(drafted.text, plain.text);
    const texts = alike === null ? "the same text." : `another text after ${alike} characters.`;
    const others = this.othersSince(this.started)
      ? " Other requests ran meanwhile, so both were slower than alone."
      : "";
    const speed = document.createElement("strong");
    speed.textContent = `${times}× the speed of plain decoding`;
    this.result.replaceChildren(
      speed,
      `: ${drafted.seconds.toFixed(2)} s instead of ${plain.seconds.toFixed(2)} s, ${texts}${others}`,
    );
  }
}

/** How many first characters are the same, or null for the same text. */
function common(one, other) {
  if (one === other) return null;
  let count = 0;
  while (count < one.length && one[count] === other[count]) count += 1;
  return count;
}
