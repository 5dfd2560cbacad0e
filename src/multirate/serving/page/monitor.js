// What the server has counted, asked for every second while somebody sees the page.

import { metrics } from "./api.js";

const EVERY = 1000;
export const KEPT = 5 * 60 * 1000; // milliseconds of samples

const NAMES = {
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  tokens: "vllm:generation_tokens_total",
  drafts: "vllm:spec_decode_num_drafts_total",
  drafted: "vllm:spec_decode_num_draft_tokens_total",
  accepted: "vllm:spec_decode_num_accepted_tokens_total",
};
const PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total";

/** A sample of Prometheus' text. */
export function parsed(text) {
  const found = { acceptedAt: [] };
  for (const line of text.split("\n")) {
    const match = line.match(/^([\w:]+)\{(.*)\} (\S+)$/);
    if (!match) continue;
    const [, name, labels, value] = match;
    const key = Object.keys(NAMES).find((one) => NAMES[one] === name);
    if (key) found[key] = Number(value);
    const place = labels.match(/position="(\d+)"/);
    if (name === PLACES && place) found.acceptedAt[Number(place[1])] = Number(value);
  }
  return found;
}

/** onSample(samples) after each answer, newest last, each with `at` and `rate` (tokens a second since
 *  the one before); onFailure(error) after none. */
export class Monitor {
  samples = [];

  constructor(onSample, onFailure) {
    this.onSample = onSample;
    this.onFailure = onFailure;
  }

  async run() {
    while (true) {
      if (document.hidden) await new Promise((resolve) => addEventListener("visibilitychange", resolve, { once: true }));
      try {
        this.take(parsed(await metrics(AbortSignal.timeout(5000))), performance.now());
        this.onSample(this.samples);
      } catch (error) {
        this.onFailure(error);
      }
      await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
  }

  take(sample, at) {
    const before = this.samples.at(-1);
    if (before && sample.tokens < before.tokens) this.samples = []; // the server was started again
    const since = this.samples.at(-1);
    const rate = since ? (1000 * (sample.tokens - since.tokens)) / (at - since.at) : null;
    this.samples.push({ ...sample, at, rate });
    this.samples = this.samples.filter((one) => one.at >= at - KEPT);
  }

  /** Whether other requests ran besides one of ours. */
  othersSince(at) {
    return this.samples.some((sample) => sample.at >= at && sample.running > 1);
  }
}
