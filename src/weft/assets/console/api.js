// HTTP to the server that the page came from. A 401 asks for the key, once for all who wait, and tries again.

const KEY = "weft-api-key";
let asking = null;
let askForKey = null; // (refused: bool) => Promise<string | null>

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function apiKey() {
  return sessionStorage.getItem(KEY);
}

async function newKey(refused) {
  asking ??= askForKey(refused).finally(() => (asking = null));
  const key = await asking;
  if (key !== null) sessionStorage.setItem(KEY, key);
  return key;
}

// The parsed answer. Raises ApiError: status 0 means that the server was not reached. A poll that is `quiet` raises at
// a 401 and does not ask.
export async function api(path, { method = "GET", signal = undefined, quiet = false } = {}) {
  for (;;) {
    const key = apiKey();
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    let response;
    try {
      response = await fetch(path, { method, headers, signal, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (response.status === 401 && !quiet) {
      if (apiKey() !== key || (await newKey(key !== null)) !== null) continue;
      throw new ApiError("This server needs an API key.", 401, "invalid_api_key");
    }
    const body = await response.json().catch(() => null);
    if (response.ok) return body;
    const error = body?.error ?? {};
    throw new ApiError(error.message ?? `The server answered ${response.status}.`, response.status, error.code ?? null);
  }
}

// What a WebSocket of this page is opened with. A browser sends no headers with it, so the key is a subprotocol.
export function openSocket(path) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  const key = apiKey();
  try {
    return key === null ? new WebSocket(url) : new WebSocket(url, ["weft", `weft-api-key.${key}`]);
  } catch {
    throw new ApiError("The API key has characters that a browser cannot send when it opens a WebSocket.");
  }
}
