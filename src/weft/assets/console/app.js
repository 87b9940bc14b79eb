// Puts the page together: which server this is, which view is shown, the key.

import { api, onKeyNeeded } from "/console/api.js";
import { Chat } from "/console/chat.js";
import { byId } from "/console/dom.js";
import { Live } from "/console/live.js";

const WIDE = matchMedia("(min-width: 1100px)");
let live = null;

onKeyNeeded((refused) => {
  const dialog = byId("key-dialog");
  byId("key-text").textContent = refused ? "The server refused that key." : "It is kept in this tab only.";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      resolve(byId("key").value.trim());
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(null); // after a submit it is resolved already
  });
});

// A gateway has /workers, a worker has not.
async function isGateway() {
  try {
    await api("/workers");
    return true;
  } catch (error) {
    if (error.status === 404) return false;
    throw error;
  }
}

async function start() {
  byId("notice").hidden = true;
  try {
    const gateway = await isGateway();
    const models = await api("/v1/models");
    byId("model").textContent = models?.data?.[0]?.id ?? "";
    byId("kind").textContent = gateway ? "gateway" : "worker";
    byId("kind").hidden = false;
    new Chat(gateway);
    live = new Live(byId("live"), gateway);
    show();
    byId("message").disabled = false; // before, nobody would take what is typed
    document.body.dataset.ready = "true";
    if (!byId("chat").hidden) byId("message").focus();
  } catch (error) {
    byId("notice").firstElementChild.textContent = error.message;
    byId("notice").hidden = false;
  }
}

function show() {
  const view = location.hash === "#live" ? "live" : "chat";
  for (const name of ["chat", "live"]) {
    byId(name).hidden = name !== view;
    if (name === view) byId(`tab-${name}`).setAttribute("aria-current", "page");
    else byId(`tab-${name}`).removeAttribute("aria-current");
  }
  byId("settings-button").hidden = view !== "chat";
  live?.show(view === "live");
}

function toggleSettings(open) {
  byId("settings").hidden = !open;
  byId("settings-button").setAttribute("aria-expanded", String(open));
}

byId("notice").lastElementChild.addEventListener("click", start);
byId("settings-button").addEventListener("click", () => {
  toggleSettings(byId("settings").hidden);
  if (!byId("settings").hidden) byId("system").focus();
});
toggleSettings(WIDE.matches);
addEventListener("hashchange", show);
show();
start();
