// The live view: asks once a second while somebody looks, and draws what it was told.

import { ApiError, api } from "/console/api.js";
import { count, el, plural, seconds } from "/console/dom.js";
import { HISTORY, legend, reach, sparkline, stackedBar, waterfall } from "/console/draw.js";
import { Tree } from "/console/tree.js";

const INTERVAL_MS = 1000;
const SHOWN_REQUESTS = 30;
const SHOWN_ROUTES = 12;
const OPEN = new Set(["queued", "pending", "processing"]);

const GAUGES = [
  ["queued", "Queued", (stats) => stats.requests.queued],
  ["pending", "Pending", (stats) => stats.requests.pending],
  ["processing", "Processing", (stats) => stats.requests.processing],
  ["rows", "Rows", (stats) => stats.batch?.rows ?? 0],
  ["tokens", "Tokens", (stats) => stats.batch?.tokens ?? 0],
  ["step", "Step, ms", (stats) => 1000 * (stats.engine.last_step_s ?? 0)],
];

export class Live {
  #gateway;
  #wanted = false;
  #loop = null; // the AbortController of the polling under way
  #worker = null;
  #history = new Map();
  #tree = new Tree();
  kvMore = hint("");
  #panels = {};

  constructor(root, gateway) {
    this.#gateway = gateway;
    this.#build(root);
    document.addEventListener("visibilitychange", () => this.#run());
  }

  show(wanted) {
    this.#wanted = wanted;
    this.#run();
  }

  // Polls while the view is shown and the page is visible, and only then.
  #run() {
    const on = this.#wanted && document.visibilityState === "visible";
    if (on === (this.#loop !== null)) return;
    if (!on) {
      this.#loop.abort();
      this.#loop = null;
      return;
    }
    this.#loop = new AbortController();
    this.#poll(this.#loop.signal);
  }

  async #poll(signal) {
    while (!signal.aborted) {
      const began = performance.now();
      await this.#ask(signal);
      const left = Math.max(0, INTERVAL_MS - (performance.now() - began));
      await new Promise((resolve) => setTimeout(resolve, left));
    }
  }

  async #ask(signal) {
    const told = [];
    if (this.#gateway) {
      const whole = [
        ["/workers", (answer) => this.#showWorkers(answer.workers)],
        ["/api/queue", (answer) => this.#showQueue(answer)],
        ["/api/routes", (answer) => this.#showRoutes(answer.routes)],
      ];
      told.push(...(await this.#each(whole, "", signal)));
    }
    const of = this.#gateway ? `/workers/${encodeURIComponent(this.#worker)}` : "";
    const one = [
      ["/stats", (answer) => this.#showStats(answer)],
      ["/v1/cache", (answer) => this.#showCache(answer)],
      ["/v1/requests", (answer) => this.#showRequests(answer.requests)],
      ["/v1/sessions", (answer) => this.#showSessions(answer.sessions)],
    ];
    if (!this.#gateway || this.#worker !== null) told.push(...(await this.#each(one, of, signal)));
    if (!signal.aborted) this.#say(told[0] ?? "");
  }

  // Asks all of them at once and shows those that answer; what the others say is returned.
  async #each(questions, prefix, signal) {
    const troubles = [];
    await Promise.all(questions.map(async ([path, show]) => {
      try {
        const answer = await api(prefix + path, { signal, quiet: true });
        if (!signal.aborted) show(answer);
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError) troubles.push(error.message);
        else {
          console.error(error);
          troubles.push(`The answer of ${prefix + path} is not understood.`);
        }
      }
    }));
    return troubles;
  }

  #say(text) {
    this.trouble.textContent = text;
    this.trouble.hidden = text === "";
  }

  // ---- panels -------------------------------------------------------------------------------------------------

  #build(root) {
    this.trouble = el("p", { class: "notice", role: "status", hidden: true });
    root.replaceChildren(el("h1", { class: "unseen" }, "Live view"), this.trouble);
    if (this.#gateway) {
      root.classList.add("of-gateway");
      root.append(this.#panel("workers", "Workers"), this.#panel("queue", "Waiting line"));
      this.picker = el("select", { id: "worker", onchange: () => this.#choose(this.picker.value) });
      root.append(el("div", { class: "pick" }, el("label", { for: "worker" }, "Worker"), this.picker));
    }
    root.append(
      this.#panel("load", "Requests and batch"),
      this.#panel("kv", "KV cache"),
      this.#panel("tree", "Radix tree"),
      this.#panel("requests", "Requests"),
    );
    if (this.#gateway) root.append(this.#panel("routes", "Routes"));
    root.append(this.#panel("sessions", "Sessions"));
    const names = [["request", null, "held by a request"], ["session", null, "by a session"], ["evictable", null, "evictable"]];
    this.#panels.tree.append(legend(names), this.#tree.node);
  }

  #panel(name, title) {
    const body = el("div", { class: "body" });
    this.#panels[name] = body;
    return el("section", { class: "panel", id: `panel-${name}`, "aria-label": title }, el("h2", {}, title), body);
  }

  // Fills a panel with an introduction and a table. The box around the table stays, and with it its focus and scroll.
  #table(name, intro, heads, kinds, rows) {
    const panel = this.#panels[name];
    if (panel.children.length === 0) {
      const label = panel.parentNode.getAttribute("aria-label");
      panel.append(el("div"), el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }));
    }
    const [above, box] = panel.children;
    above.replaceChildren(...(intro === null ? [] : [intro]));
    const cells = (tag, row) => row.map((cell, i) => el(tag, { class: kinds[i] || null }, cell));
    const body = el("tbody", {}, rows.map((row) => el("tr", {}, cells("td", row))));
    box.hidden = rows.length === 0;
    box.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, cells("th", heads))), body));
  }

  #choose(name) {
    this.#worker = name;
    this.#history.clear();
  }

  #showStats(stats) {
    const tiles = GAUGES.map(([name, title, read]) => {
      const values = this.#history.get(name) ?? [];
      values.push(read(stats));
      if (values.length > HISTORY) values.shift();
      this.#history.set(name, values);
      const now = values.at(-1);
      return el(
        "div",
        { class: `tile ${name}` },
        el("span", { class: "name" }, title),
        el("b", { "data-gauge": name }, name === "step" ? now.toFixed(1) : count(now)),
        sparkline(values, `${title}, the last ${plural(values.length, "second")}`),
      );
    });
    const ended = Object.entries(stats.requests.finished ?? {}).map(([name, number]) => `${name} ${count(number)}`);
    const line = `Engine ${stats.engine.backend}, ${count(stats.engine.steps)} steps. Ended: ${ended.join(", ") || "none"}.`;
    this.#panels.load.replaceChildren(el("div", { class: "tiles" }, tiles), hint(line));
    const more = [`evicted ${count(stats.kv.evicted_total)}`];
    if (stats.kv.host) more.push(`second tier ${count(stats.kv.host)}`);
    if (stats.sequence_ids) more.push(`sequence ids ${count(stats.sequence_ids.used)} of ${count(stats.sequence_ids.total)}`);
    this.kvMore.textContent = more.join(" · ");
  }

  #showCache(cache) {
    const parts = [["active", cache.active, "active"], ["cached", cache.cached, "cached"], ["free", cache.free, "free"]];
    this.#panels.kv.replaceChildren(
      stackedBar(parts, cache.capacity),
      legend(parts),
      hint(`capacity ${count(cache.capacity)} tokens`),
      this.kvMore,
    );
    this.#tree.show(cache);
  }

  #showRequests(all) {
    const open = all.filter((request) => OPEN.has(request.state));
    const ended = all.filter((request) => !OPEN.has(request.state));
    ended.sort((a, b) => (a.ended_s_ago ?? 0) - (b.ended_s_ago ?? 0));
    const shown = [...open.reverse(), ...ended].slice(0, SHOWN_REQUESTS);
    const span = reach(shown);
    const axis = el("span", { class: "axis" }, el("span", {}, `${seconds(span)} ago`), el("span", {}, "now"));
    const rows = shown.map((request) => [
      el("code", {}, request.id),
      el("span", { class: `state ${request.state}` }, request.state),
      el("span", {}, el("b", {}, count(request.cached_tokens)), ` / ${count(request.prompt_tokens)}`),
      count(request.output_tokens),
      waterfall(request, span),
      whyMissed(request.miss),
      request.session_id ?? "",
    ]);
    const heads = ["id", "state", "cached / prompt", "output", axis, "miss", "session"];
    const kinds = ["", "", "number", "number spare", "wide", "spare", "spare clip"];
    const times = [["queued", null, "queued"], ["pending", null, "pending"], ["processing", null, "processing"]];
    const intro = rows.length ? legend(times) : hint("No requests yet.");
    this.#table("requests", intro, heads, kinds, rows);
  }

  #showSessions(sessions) {
    const rows = [...sessions].reverse().map((session) => [
      el("code", {}, session.id),
      count(session.tokens),
      count(session.turns),
      `${seconds(session.last_used_s_ago)} ago`,
      `in ${seconds(session.expires_in_s)}`,
    ]);
    const kinds = ["clip", "number", "number", "number", "number"];
    const intro = rows.length ? null : hint("No session keeps KV.");
    this.#table("sessions", intro, ["session", "tokens", "turns", "used", "expires"], kinds, rows);
  }

  // ---- of a gateway -------------------------------------------------------------------------------------------

  #showWorkers(workers) {
    const names = workers.map((worker) => worker.name);
    if (names.join("\n") !== Array.from(this.picker.options, (option) => option.value).join("\n")) {
      this.picker.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    }
    if (!names.includes(this.#worker)) this.#choose(names[0] ?? null);
    if (this.#worker !== null) this.picker.value = this.#worker;
    const rows = workers.map((worker) => [
      el("b", {}, worker.name),
      el("span", { class: `state ${worker.state}` }, worker.state),
      used(worker.slots),
      used(worker.sessions),
      count(worker.queued),
      count(worker.hits),
      count(worker.failures),
      el("code", {}, worker.url),
    ]);
    const heads = ["worker", "state", "slots", "sessions", "queue", "hits", "failures", "url"];
    const kinds = ["", "", "number", "number", "number", "number", "number", "spare"];
    this.#table("workers", rows.length ? null : hint("No workers."), heads, kinds, rows);
  }

  #showQueue({ queue_length: length, tickets = [] }) {
    const line = length ? `${plural(length, "turn waits", "turns wait")} for a worker.` : "Nobody waits.";
    const rows = tickets.map((ticket) => [
      count(ticket.position),
      el("code", {}, ticket.ticket_id),
      seconds(ticket.waited_s),
      Number.isFinite(ticket.estimated_wait_s) ? `about ${seconds(ticket.estimated_wait_s)}` : "",
    ]);
    const kinds = ["number", "clip", "number", "number"];
    this.#table("queue", hint(line), ["position", "ticket", "waited", "to go"], kinds, rows);
  }

  #showRoutes(routes) {
    const rows = routes.slice(0, SHOWN_ROUTES).map((route) => [
      new Date(1000 * route.time).toLocaleTimeString("en-GB"),
      route.kind,
      el("b", {}, route.worker ?? "–"),
      route.reason,
      count(route.cached_tokens),
      Number.isFinite(route.cost) ? seconds(route.cost) : "",
    ]);
    const kinds = ["", "spare", "", "", "number", "number spare"];
    const intro = rows.length ? null : hint("Nothing routed yet.");
    this.#table("routes", intro, ["time", "kind", "worker", "reason", "cached", "cost"], kinds, rows);
  }
}

const hint = (text) => el("p", { class: "hint" }, text);

const used = ({ used: taken, total }) => `${count(taken)} / ${count(total)}`;

const whyMissed = (miss) => (miss === null || miss === undefined ? "" : `${miss.reason.replaceAll("_", " ")} at ${count(miss.at_token)}`);
