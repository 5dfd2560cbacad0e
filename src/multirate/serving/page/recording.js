// An answer's tokens and when each arrived, so that it can be shown again at its own pace.

export class Recording {
  /** {at, text, origin} of each token; at: milliseconds since the first one. */
  pieces = [];
  began = null;
  timings = null;
  finish = null;

  /** Adds a chunk of the stream. */
  add(chunk, now = performance.now()) {
    const choice = chunk.choices[0];
    for (const [text, origin] of choice?.origins ?? []) {
      this.began ??= now;
      this.pieces.push({ at: now - this.began, text, origin });
    }
    this.timings = chunk.timings ?? this.timings;
    this.finish = choice?.finish_reason ?? this.finish;
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  /** How many of the first tokens had arrived after so many milliseconds. */
  countAt(elapsed) {
    const next = this.pieces.findIndex((piece) => piece.at > elapsed);
    return next < 0 ? this.pieces.length : next;
  }

  /** Tokens a second among the first `count`, or null while nothing can be said. */
  rateOf(count) {
    const last = this.pieces[count - 1]?.at ?? 0;
    const after = count - this.countAt(0);
    return last > 0 ? (1000 * after) / last : null;
  }

  /** Tokens a second and seconds by the server's clock, without the time to read the prompt. */
  get rate() {
    return this.timings?.predicted_per_second ?? this.rateOf(this.pieces.length);
  }

  get seconds() {
    return (this.timings?.predicted_ms ?? this.pieces.at(-1)?.at ?? 0) / 1000;
  }
}

export function shownRate(rate) {
  if (rate === null) return "";
  return `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`;
}
