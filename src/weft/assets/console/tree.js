// The radix tree as threads: from left to right the position in the prompt, one thread for each branch. A node is as
// wide as it has tokens; its heaviest child goes on in the same row, the others begin rows below.

import { count, plural, seconds, svg, el } from "/console/dom.js";

const ROW = 13;
const BAR = 9;
const WIDTH = 1000;
const HOLDERS = { request: "held by a request", session: "held by a session" };

// Places of the nodes: [{node, start, row}], and how many tokens and rows there are in all.
function layout(nodes) {
  const children = new Map();
  for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const weights = new Map(nodes.map((node) => [node.id, node.tokens]));
  for (const node of [...nodes].reverse()) {
    if (node.parent !== null) weights.set(node.parent, weights.get(node.parent) + weights.get(node.id));
  }
  for (const list of children.values()) list.sort((a, b) => weights.get(b.id) - weights.get(a.id) || a.id - b.id);
  const places = [];
  let rows = 0, end = 1;
  const stack = [...(children.get(null) ?? [])].reverse().map((node) => ({ node, start: 0, row: null, from: null }));
  while (stack.length) {
    const place = stack.pop();
    place.row ??= rows++;
    places.push(place);
    const start = place.start + place.node.tokens;
    end = Math.max(end, start);
    const below = children.get(place.node.id) ?? [];
    for (let i = below.length - 1; i >= 0; i--) {
      stack.push({ node: below[i], start, row: i === 0 ? place.row : null, from: place.row });
    }
  }
  return { places, rows, end };
}

export class Tree {
  #shape = "";
  #places = [];
  #marks = [];
  #chosen = null;

  constructor() {
    this.picture = svg("svg", { class: "tree", tabindex: 0, role: "img" });
    this.box = el("div", { class: "tree-box" }, this.picture);
    this.told = el("p", { class: "hint tree-told", "aria-live": "polite" });
    this.node = el("div", {}, this.box, this.told);
    this.picture.addEventListener("pointerover", (event) => this.#choose(this.#marks.indexOf(event.target)));
    this.picture.addEventListener("keydown", (event) => this.#step(event));
  }

  // Draws anew only where something other than the ages has changed, so that nothing flickers under a pointer.
  show(cache) {
    const shape = JSON.stringify(cache.nodes.map((node) => [node.parent, node.tokens, node.held]));
    this.truncated = cache.truncated;
    this.nodes = cache.nodes;
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#draw(cache.nodes);
    }
    this.#tell();
  }

  #draw(nodes) {
    const { places, rows, end } = layout(nodes);
    const height = Math.max(1, rows) * ROW;
    this.picture.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    this.picture.setAttribute("preserveAspectRatio", "none");
    this.picture.style.height = `${height}px`;
    this.picture.setAttribute("aria-label", `Radix tree: ${plural(nodes.length, "node")} in ${plural(rows, "branch", "branches")}, arrow keys walk through it`);
    this.#places = places;
    const lines = [];
    this.#marks = places.map(({ node, start, row, from }) => {
      const x = (WIDTH * start) / end;
      const y = row * ROW + (ROW - BAR) / 2;
      if (from !== null && from !== row) {
        lines.push(svg("path", { class: "link", "vector-effect": "non-scaling-stroke", d: `M${x} ${from * ROW + ROW / 2}V${y + BAR / 2}` }));
      }
      const width = Math.max(2, (WIDTH * node.tokens) / end - 1);
      return svg("rect", { class: node.held ?? "evictable", "data-node": node.id, x, y, width, height: BAR });
    });
    this.picture.replaceChildren(...lines, ...this.#marks);
    if (this.#chosen !== null && this.#chosen >= places.length) this.#chosen = null;
    this.#marks[this.#chosen]?.classList.add("chosen");
  }

  #choose(index) {
    if (index < 0) return;
    this.#marks[this.#chosen]?.classList.remove("chosen");
    this.#chosen = index;
    this.#marks[index].classList.add("chosen");
    this.#tell();
  }

  #step(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const step = steps[event.key];
    if (step === undefined || this.#places.length === 0) return;
    event.preventDefault();
    const next = this.#chosen === null ? 0 : this.#chosen + step;
    this.#choose(Math.min(this.#places.length - 1, Math.max(0, next)));
    this.#marks[this.#chosen].scrollIntoView?.({ block: "nearest" });
  }

  #tell() {
    const more = this.truncated ? ` ${plural(this.truncated, "lighter node")} not shown.` : "";
    if (this.#chosen === null) {
      this.told.textContent = `${plural(this.nodes.length, "node")}.${more}`;
      return;
    }
    const { node, start } = this.#places[this.#chosen];
    const now = this.nodes[node.id] ?? node;
    const age = now.last_used_s_ago === null ? "" : `, used ${seconds(now.last_used_s_ago)} ago`;
    const held = HOLDERS[now.held] ?? "evictable";
    this.told.textContent =
      `Tokens ${count(start)} to ${count(start + node.tokens)} (${count(node.tokens)}), depth ${node.depth}, ${held}${age}.${more}`;
  }
}
