// One conversation over the session WebSocket, turn by turn.
//
// The page sends the whole conversation each time, so a connection can be thrown away at any moment: whatever does not
// end with `done` closes it, and the next turn opens a new one. The server then has the conversation as it was before.

import { api, openSocket } from "/console/api.js";

const BUSY_TRIES = 6; // a connection that has just been closed may still count as this session's for a moment
const BUSY_WAIT_MS = 200;

export class TurnError extends Error {
  constructor(message, code, retryAfterS = null) {
    super(message);
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

export class Session {
  #id;
  #gateway;
  #socket = null;
  #opening = null;
  #closing = null; // resolves when the last connection is closed
  #turn = null;
  #stopped = false; // between two tries of a turn

  constructor(id, gateway) {
    this.#id = id;
    this.#gateway = gateway;
  }

  // Runs one turn; `on` hears of queued, route, prefilled, text, audio. Returns the `done` frame; raises TurnError.
  async run(messages, options, on) {
    this.#stopped = false;
    for (let tries = 1; ; tries++) {
      const turn = { messages, options, on, phase: "connecting", ticket: null, stopping: false };
      turn.promise = new Promise((resolve, reject) => Object.assign(turn, { resolve, reject }));
      this.#turn = turn;
      this.#begin(turn).catch((error) => this.#fail(turn, error));
      try {
        return await turn.promise;
      } catch (error) {
        if (error.code !== "session_busy" || tries === BUSY_TRIES) throw error;
        await new Promise((resolve) => setTimeout(resolve, BUSY_WAIT_MS));
        if (this.#stopped) throw new TurnError("Cancelled.", "cancelled");
      }
    }
  }

  // Ends the turn under way, whatever it is doing. A second call does not wait for the server any more.
  async stop() {
    const turn = this.#turn;
    this.#stopped = true;
    if (turn === null) return;
    const again = turn.stopping;
    turn.stopping = true;
    if (turn.phase === "generating" && !again) {
      this.#send({ type: "stop" });
      return;
    }
    if (turn.phase === "queued" && !again) {
      const ticket = encodeURIComponent(turn.ticket);
      // A ticket that is gone has been served or cancelled: closing the connection ends it either way.
      await api(`/api/queue/${ticket}`, { method: "DELETE" }).catch(() => null);
    }
    this.#fail(turn, new TurnError("Cancelled.", "cancelled"));
  }

  async #begin(turn) {
    const socket = await this.#open();
    if (this.#turn !== turn) return;
    turn.phase = "prefilling";
    const prefill = { type: "prefill", messages: turn.messages };
    if (!this.#gateway) prefill.clear_kv_cache = true;
    socket.send(JSON.stringify(prefill));
  }

  #open() {
    if (this.#socket !== null) return Promise.resolve(this.#socket);
    this.#opening ??= this.#connect().finally(() => (this.#opening = null));
    return this.#opening;
  }

  async #connect() {
    await this.#closing;
    const socket = openSocket(`/ws/streaming/${encodeURIComponent(this.#id)}`);
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onclose = () => reject(new TurnError("", "refused"));
    }).catch(async (error) => {
      throw new TurnError(await whyRefused(), error.code);
    });
    this.#socket = socket;
    socket.onmessage = (event) => this.#receive(socket, event.data);
    socket.onclose = () => this.#lost(socket);
    return socket;
  }

  #send(frame) {
    this.#socket?.send(JSON.stringify(frame));
  }

  #receive(socket, data) {
    const turn = this.#turn;
    if (socket !== this.#socket || turn === null) return;
    const frame = JSON.parse(data);
    switch (frame.type) {
      case "queued":
      case "queue_update":
        turn.phase = "queued";
        turn.ticket = frame.ticket_id;
        turn.on.queued(frame);
        break;
      case "queue_done":
        turn.phase = "prefilling";
        turn.on.route(frame);
        break;
      case "prefill_done":
        turn.on.prefilled(frame);
        turn.phase = "generating";
        this.#send({ type: "generate", ...turn.options });
        break;
      case "chunk":
        if (frame.text_delta) turn.on.text(frame.text_delta);
        if (frame.audio_data) turn.on.audio(frame);
        break;
      case "done":
        this.#turn = null;
        turn.resolve(frame);
        break;
      case "error":
        this.#fail(turn, new TurnError(frame.message, frame.code, frame.retry_after_s ?? null));
        break;
      default: // frames of a newer server
    }
  }

  #lost(socket) {
    if (socket !== this.#socket) return;
    this.#socket = null;
    if (this.#turn !== null) this.#fail(this.#turn, new TurnError("The connection was lost.", "connection_lost"));
  }

  #fail(turn, error) {
    if (this.#turn !== turn) return;
    this.#turn = null;
    this.#close();
    turn.reject(error);
  }

  #close() {
    const socket = this.#socket;
    this.#socket = null;
    if (socket === null || socket.readyState === WebSocket.CLOSED) return;
    this.#closing = new Promise((resolve) => (socket.onclose = resolve));
    socket.close();
  }
}

// A browser does not tell why a WebSocket was refused, so the server is asked in another way.
async function whyRefused() {
  try {
    await api("/v1/models");
  } catch (error) {
    return error.message;
  }
  return "The server refused the connection for this conversation.";
}
