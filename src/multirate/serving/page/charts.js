// The charts, drawn by hand as SVG, and the same numbers as tables.

import { KEPT } from "./monitor.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44; // room for the numbers of the vertical axis
const BOTTOM = 22;
const TOP = 8;
const MOST_PLACES = 12;

function drawn(name, attributes, text) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

/** An empty chart with a vertical axis from 0 to `most`. */
class Chart {
  constructor(place, height, label, most, ticks, written) {
    this.width = Math.max(place.clientWidth, 160);
    this.height = height;
    this.most = most;
    const size = { viewBox: `0 0 ${this.width} ${height}`, height, role: "img", "aria-label": label };
    this.root = drawn("svg", size);
    for (const tick of ticks) {
      const y = this.y(tick);
      this.add("line", { x1: LEFT, x2: this.width, y1: y, y2: y, class: tick ? "grid" : "axis" });
      this.add("text", { x: LEFT - 6, y: y + 4, class: "end" }, written(tick));
    }
    place.replaceChildren(this.root);
  }

  add(name, attributes, text) {
    this.root.append(drawn(name, attributes, text));
  }

  y(value) {
    return TOP + (this.height - TOP - BOTTOM) * (1 - value / this.most);
  }

  under(x, text, type = "middle") {
    this.add("text", { x, y: this.height - 6, class: type }, text);
  }
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function table(place, heads, rows) {
  const key = JSON.stringify(rows);
  if (place.dataset.rows === key) return; // somebody may be reading it
  place.dataset.rows = key;
  const found = document.createElement("table");
  const line = (cells, name) => {
    const row = found.insertRow();
    for (const [place, cell] of cells.entries()) {
      const one = document.createElement(name === "th" || !place ? "th" : "td");
      one.scope = name === "th" ? "col" : "row";
      one.textContent = cell;
      row.append(one);
    }
  };
  line(heads, "th");
  for (const row of rows) line(row, "td");
  place.replaceChildren(found);
}

const byId = (name) => document.getElementById(name);

/** Which share of the drafts was accepted up to each position, since the server's start. */
export function drawAcceptance(sample) {
  const shares = [];
  if (sample.drafts) {
    for (const count of sample.acceptedAt.slice(0, MOST_PLACES)) shares.push((count ?? 0) / sample.drafts);
  }
  const names = shares.map((_, place) => String(place + 1));
  const label = shares.length
    ? `Accepted by position: ${shares.map((share, place) => `${place + 1}: ${percent(share)}`).join(", ")}`
    : "No drafts yet";
  const chart = new Chart(byId("acceptance"), 140, label, 1, [0, 0.5, 1], percent);
  const step = (chart.width - LEFT) / Math.max(shares.length, 5);
  const wide = Math.min(step * 0.7, 56);
  for (const [place, share] of shares.entries()) {
    const x = LEFT + step * (place + 0.5);
    const y = chart.y(share);
    chart.add("rect", { x: x - wide / 2, y, width: wide, height: chart.y(0) - y, rx: 2, class: "bar" });
    if (step > 34) chart.add("text", { x, y: Math.max(y - 4, 12), class: "middle value" }, percent(share));
    chart.under(x, names[place]);
  }
  const rate = sample.drafted ? percent(sample.accepted / sample.drafted) : "–";
  const length = sample.drafts ? (1 + sample.accepted / sample.drafts).toFixed(2) : "–";
  byId("acceptance-note").textContent = sample.drafts
    ? `Share of the drafts since the server started that were right up to each token. ${rate} of the drafted tokens were emitted, ${length} tokens per pass with a draft.`
    : "No drafts since the server started.";
  table(byId("acceptance-table"), ["Position", ...names], [["Accepted", ...shares.map(percent)]]);
}

/** A round number at or above `value`. */
function roundUp(value, least) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, least)));
  return [1, 2, 3, 4, 6, 8, 10].map((one) => one * size).find((one) => one >= Math.max(value, least));
}

/** A time axis from the first sample, or a minute ago, to now. */
function timeAxis(chart, samples) {
  const now = performance.now();
  const span = Math.min(Math.max(now - samples[0].at, 60_000), KEPT);
  const x = (at) => chart.width - ((now - at) / span) * (chart.width - LEFT);
  const unit = span > 120_000 ? 60 : 20;
  for (let ago = unit; ago * 1000 <= span * 0.95; ago += unit) {
    chart.under(x(now - ago * 1000), unit === 60 ? `−${ago / 60} min` : `−${ago} s`);
  }
  chart.under(chart.width, "now", "end");
  return x;
}

/** Tokens a second, and requests, of the last minutes. */
export function drawLoad(samples) {
  const latest = samples.at(-1);
  const rates = samples.filter((sample) => sample.rate !== null);
  const highest = (key, from) => Math.max(0, ...from.map((sample) => sample[key]));
  const mostRate = highest("rate", rates);
  const now = Math.round(latest.rate ?? 0);
  const top = roundUp(mostRate, 10);
  const whole = (tick) => String(Math.round(tick * 10) / 10);
  const speed = new Chart(
    byId("speed"), 110, `Tokens a second: now ${now}, at most ${Math.round(mostRate)}`, top, [0, top / 2, top], whole);
  const x = timeAxis(speed, samples);
  const points = rates.map((sample) => `${x(sample.at).toFixed(1)},${speed.y(sample.rate).toFixed(1)}`);
  if (points.length > 1) {
    const [from, to] = [x(rates[0].at), x(latest.at)];
    speed.add("polygon", { points: `${from},${speed.y(0)} ${points.join(" ")} ${to},${speed.y(0)}`, class: "area" });
    speed.add("polyline", { points: points.join(" "), class: "line" });
  }
  speed.add("text", { x: LEFT + 6, y: TOP + 12, class: "value" }, `${now} tokens/s`);

  const most = Math.max(highest("running", samples), highest("waiting", samples));
  const peak = most <= 4 ? 4 : roundUp(most, 5);
  const said = `Requests: now ${latest.running} running and ${latest.waiting} waiting`;
  const requests = new Chart(byId("requests"), 86, said, peak, [0, peak / 2, peak], whole);
  timeAxis(requests, samples);
  for (const key of ["running", "waiting"]) {
    const steps = samples.flatMap((sample, place) => {
      const to = samples[place + 1]?.at ?? sample.at;
      const y = requests.y(sample[key]).toFixed(1);
      return [`${x(sample.at).toFixed(1)},${y}`, `${x(to).toFixed(1)},${y}`];
    });
    requests.add("polyline", { points: steps.join(" "), class: `line ${key}` });
  }
  for (const [place, key] of ["running", "waiting"].entries()) {
    const from = LEFT + 6 + place * 110;
    requests.add("line", { x1: from, x2: from + 18, y1: TOP + 8, y2: TOP + 8, class: `line ${key}` });
    requests.add("text", { x: from + 24, y: TOP + 12, class: "value" }, `${latest[key]} ${key}`);
  }

  table(byId("load-table"), ["", "Now", "Highest"], [
    ["Tokens/s", now, Math.round(mostRate)],
    ["Running", latest.running, highest("running", samples)],
    ["Waiting", latest.waiting, highest("waiting", samples)],
  ]);
}
