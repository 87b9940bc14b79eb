// The chat: turns, their fates and facts. What is sent is made of the turns that ended well, and the new message.

import { byId, count, el, plural, seconds } from "/console/dom.js";
import { Player } from "/console/audio.js";
import { Session } from "/console/session.js";

const SESSION = "weft-session";
const SETTINGS = "weft-settings";
const NUMBERS = { temperature: "temperature", max_tokens: "max_new_tokens", seed: "seed" };
const NEAR_PX = 80; // who has scrolled further up than this is not pulled down again

export class Chat {
  #session;
  #turns = [];
  #player = new Player(() => this.#showState());
  #running = null;

  constructor(gateway) {
    this.#session = new Session(sessionId(), gateway);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    byId("message").addEventListener("input", grow);
    byId("stop").addEventListener("click", () => this.#stop());
    byId("new").addEventListener("click", () => this.#begin());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open) this.#stop();
    });
    restoreSettings();
    byId("settings-form").addEventListener("input", saveSettings);
    this.#showState();
  }

  #submit() {
    const text = byId("message").value;
    if (this.#running !== null || !text.trim()) return;
    const options = readSettings();
    if (options === null) return;
    byId("message").value = "";
    grow();
    this.#run(new Turn(text), options);
  }

  #retry(turn) {
    const options = readSettings();
    if (this.#running !== null || options === null) return;
    this.#turns.splice(this.#turns.indexOf(turn), 1);
    turn.node.remove();
    byId("message").focus();
    this.#run(new Turn(turn.text), options);
  }

  async #run(turn, { system, generate }) {
    for (const old of this.#turns) old.settle();
    const messages = this.#messages(system);
    messages.push({ role: "user", content: turn.text });
    this.#turns.push(turn);
    byId("turns").append(turn.node);
    byId("empty").hidden = true;
    this.#running = turn;
    this.#player.stop();
    if (generate.generate_audio) this.#player.unlock();
    this.#showState();
    follow(true);
    try {
      turn.done(await this.#session.run(messages, generate, this.#listener(turn)));
    } catch (error) {
      turn.fail(error, () => this.#retry(turn));
      if (error.code === "cancelled" && this.#turns.includes(turn) && byId("message").value === "") {
        byId("message").value = turn.text;
        grow();
      }
    }
    this.#running = null;
    this.#showState();
    follow();
  }

  #listener(turn) {
    return {
      queued: (frame) => turn.queued(frame, () => this.#stop()),
      route: (frame) => turn.routed(frame),
      prefilled: (frame) => turn.prefilled(frame),
      text: (delta) => {
        turn.say(delta);
        follow();
      },
      audio: (frame) => this.#player.play(frame.audio_data, frame.audio_sample_rate),
    };
  }

  #messages(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.#turns) {
      if (!turn.counts) continue;
      messages.push({ role: "user", content: turn.text }, { role: "assistant", content: turn.answer });
    }
    return messages;
  }

  #stop() {
    this.#player.stop();
    if (this.#running === null) return;
    this.#running.stopping();
    this.#session.stop();
  }

  async #begin() {
    this.#stop();
    this.#turns = [];
    byId("turns").replaceChildren();
    byId("empty").hidden = false;
    this.#showState();
    byId("message").focus();
  }

  #showState() {
    const busy = this.#running !== null;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy && !this.#player.playing;
    byId("stop").textContent = busy ? "Stop" : "Silence";
    byId("new").disabled = this.#turns.length === 0;
    const told = this.#turns.filter((turn) => turn.counts).length;
    byId("tally").textContent = told ? plural(told, "turn") : "";
    document.body.dataset.state = busy ? "busy" : "idle";
  }
}

// One message, its answer, and what became of it. `counts`: it is part of the conversation.
class Turn {
  counts = false;
  answer = "";
  #began = performance.now();
  #firstMs = null;
  #worker = null;
  #prefill = null;

  constructor(text) {
    this.text = text;
    this.said = document.createTextNode("");
    this.status = el("p", { class: "status" }, "connecting");
    this.reply = el("p", { class: "text" }, this.said);
    this.box = el("div", { class: "answer", "aria-busy": "true" }, el("span", { class: "who" }, byId("model").textContent), this.reply);
    this.facts = el("div", { class: "facts" });
    this.node = el(
      "li",
      { class: "turn running" },
      el("div", { class: "user" }, el("span", { class: "who" }, "You"), el("p", { class: "text" }, text)),
      this.box,
      this.status,
      this.facts,
    );
  }

  queued(frame, cancel) {
    const wait = Number.isFinite(frame.estimated_wait_s) ? `, about ${seconds(frame.estimated_wait_s)}` : "";
    const line = `Waiting: position ${count(frame.position)} of ${count(frame.queue_length)}${wait}`;
    if (this.place === undefined) {
      this.place = el("span", { class: "place" });
      const button = el("button", { type: "button", class: "quiet small cancel", onclick: cancel }, "Cancel");
      this.status.replaceChildren(this.place, " ", button);
    }
    this.place.textContent = line;
  }

  routed({ route }) {
    this.#worker = route;
    this.place = undefined;
    this.status.replaceChildren("reading the prompt");
  }

  prefilled(frame) {
    this.#prefill = frame;
    this.status.replaceChildren("thinking");
    this.#showFacts();
  }

  say(delta) {
    this.#firstMs ??= performance.now() - this.#began;
    this.answer += delta;
    this.said.appendData(delta);
    this.status.hidden = true;
  }

  stopping() {
    this.status.hidden = false;
    this.status.replaceChildren("stopping");
  }

  done(frame) {
    this.counts = true;
    this.#end(frame.stopped ? "stopped" : "done");
    if (this.answer === "") this.reply.append(el("em", {}, frame.stopped ? "stopped before a word" : "nothing said"));
    this.#showFacts(frame);
  }

  // Shows what went wrong. The turn is no part of the conversation, and can be tried again.
  fail(error, retry) {
    const cancelled = error.code === "cancelled";
    this.#end(cancelled ? "cancelled" : "failed");
    this.box.hidden = this.answer === "";
    const text = cancelled ? "Cancelled." : problem(error);
    this.again = el("button", { type: "button", class: "quiet small retry", onclick: retry }, "Retry");
    const note = el("p", { class: "problem", role: cancelled ? "status" : "alert" }, el("span", {}, text), " ", this.again);
    this.node.append(note);
  }

  // A later turn begins: this one can no longer be tried again in its place.
  settle() {
    this.again?.remove();
  }

  #end(state) {
    this.node.classList.remove("running");
    this.node.classList.add(state);
    this.node.dataset.state = state;
    this.box.setAttribute("aria-busy", "false");
    this.status.remove();
  }

  #showFacts(done = null) {
    const stats = done?.token_stats ?? {
      cached: this.#prefill.cached_tokens,
      input: this.#prefill.input_tokens,
      generated: null,
    };
    const parts = [fact("cached", count(stats.cached), "cached"), fact("input", count(stats.input), "new")];
    if (done !== null) {
      parts.push(fact("generated", count(stats.generated), "generated"));
      parts.push(fact("elapsed", `${count(done.elapsed_ms)} ms`, ""));
      if (this.#firstMs !== null) parts.push(fact("first", seconds(this.#firstMs / 1000), "to the first word"));
      if (done.finish_reason === "length") parts.push(fact("reason", "cut", "at the token limit"));
      if (done.stopped) parts.push(fact("reason", "stopped", ""));
    }
    if (this.#worker !== null) parts.push(fact("route", this.#worker.worker, this.#worker.reason));
    const bar = el("span", { class: "split", "aria-hidden": "true" });
    for (const name of ["cached", "input", "generated"]) {
      const piece = el("i", { class: name });
      piece.style.flexGrow = String(stats[name] ?? 0);
      bar.append(piece);
    }
    this.facts.replaceChildren(bar, ...parts);
  }
}

function problem({ message, retryAfterS }) {
  const told = /[.!?]$/.test(message) ? message : `${message}.`;
  return Number.isFinite(retryAfterS) ? `${told} Try again in ${seconds(retryAfterS)}.` : told;
}

function fact(name, value, unit) {
  return el("span", { class: `fact ${name}`, "data-fact": name }, el("b", {}, value), unit ? ` ${unit}` : "");
}

function sessionId() {
  let id = sessionStorage.getItem(SESSION);
  if (id === null) {
    const bytes = crypto.getRandomValues(new Uint8Array(12));
    id = `console-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    sessionStorage.setItem(SESSION, id);
  }
  return id;
}

// What the settings say; null, with the field shown, where one is out of range.
function readSettings() {
  const form = byId("settings-form");
  const generate = {};
  for (const [name, parameter] of Object.entries(NUMBERS)) {
    const field = form.elements[name];
    if (!field.checkValidity()) {
      byId("settings").hidden = false;
      byId("settings-button").setAttribute("aria-expanded", "true");
      field.reportValidity();
      return null;
    }
    if (field.value !== "") generate[parameter] = field.valueAsNumber;
  }
  if (form.elements.audio.checked) generate.generate_audio = true;
  return { system: form.elements.system.value.trim(), generate };
}

function saveSettings() {
  const { elements } = byId("settings-form");
  const kept = { system: elements.system.value, audio: elements.audio.checked };
  for (const name of Object.keys(NUMBERS)) kept[name] = elements[name].value;
  sessionStorage.setItem(SETTINGS, JSON.stringify(kept));
}

function restoreSettings() {
  const kept = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
  const { elements } = byId("settings-form");
  elements.system.value = kept.system ?? "";
  elements.audio.checked = kept.audio ?? false;
  for (const name of Object.keys(NUMBERS)) elements[name].value = kept[name] ?? "";
}

function grow() {
  const field = byId("message");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
}

function follow(always = false) {
  const scroller = byId("scroller");
  const away = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  if (always || away < NEAR_PX) scroller.scrollTop = scroller.scrollHeight;
}
