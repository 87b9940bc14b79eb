// Small pictures of numbers, as SVG.

import { count, el, seconds, svg } from "/console/dom.js";

export const HISTORY = 120; // samples

// A line over the last samples; the newest is at the right edge.
export function sparkline(values, label) {
  const width = 120, height = 28;
  const top = Math.max(1, ...values);
  const at = (value, i) => {
    const x = width - (values.length - 1 - i) * (width / (HISTORY - 1));
    return `${x.toFixed(1)},${(height - 2 - (value / top) * (height - 5)).toFixed(1)}`;
  };
  const line = values.map(at).join(" ");
  const first = (width - (values.length - 1) * (width / (HISTORY - 1))).toFixed(1);
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("polygon", { points: `${first},${height} ${line} ${width},${height}` }),
    svg("polyline", { points: line, "vector-effect": "non-scaling-stroke" }),
  );
}

// One bar in parts: [[class, tokens, label]].
export function stackedBar(parts, total) {
  const bar = el("div", { class: "stack", role: "img", "aria-label": parts.map(([, n, name]) => `${name} ${count(n)}`).join(", ") });
  for (const [name, tokens] of parts) {
    const piece = el("i", { class: name });
    piece.style.width = `${total > 0 ? (100 * tokens) / total : 0}%`;
    bar.append(piece);
  }
  return bar;
}

export function legend(parts) {
  return el("ul", { class: "legend" }, parts.map(([name, value, label]) =>
    el("li", {}, el("i", { class: name }), ` ${label} `, value === null ? null : el("b", { "data-kv": name }, count(value))),
  ));
}

const SPANS_S = [10, 30, 60, 120, 300, 900, 3600];

// How far back a picture of these requests reaches.
export function reach(requests) {
  const longest = Math.max(0, ...requests.map((request) => startOf(request)));
  return SPANS_S.find((span) => span >= longest) ?? SPANS_S.at(-1);
}

const startOf = (request) => (request.age_s ?? 0) + (request.ended_s_ago ?? 0); // s ago

// The times in each state, on one axis for all requests: its right edge is now, its left edge `span` seconds ago.
export function waterfall(request, span) {
  const times = [["queued", request.times.queued_s], ["pending", request.times.pending_s], ["processing", request.times.processing_s]];
  const label = times.map(([name, s]) => `${name} ${seconds(s)}`).join(", ");
  const box = svg("svg", { class: "fall", viewBox: "0 0 1000 12", preserveAspectRatio: "none", role: "img", "aria-label": label });
  box.append(svg("title", {}, label));
  let x = 1000 * (1 - startOf(request) / span);
  for (const [name, s] of times) {
    const width = (1000 * s) / span;
    if (s > 0) box.append(svg("rect", { class: name, x: x.toFixed(2), y: 1, height: 10, width: Math.max(width, 2).toFixed(2) }));
    x += width;
  }
  return box;
}
