// Keeps a live page up to date. Its parts arrive as server-sent events and replace the elements with their ids. The browser reconnects.
// A page that nobody sees has no stream: a browser opens only a few connections to a server, and other tabs need them.
"use strict";

const live = document.querySelector("[data-live]");
const isCalm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
const QUIET_MS = 5000;
const AGAIN_MS = 3000;
const SILENT_MS = 10000;
const UNANSWERED = "Not live: the dashboard does not answer. This page shows its last state.";

if (live) {
  const address = new URL(live.dataset.live, document.baseURI);
  if (isCalm) address.searchParams.set("calm", "1");
  const state = document.getElementById("live-state");
  let silentSince = null;
  let heardAt = Date.now();
  const say = (text) => {
    if (state && state.textContent !== text) state.textContent = text;
  };
  let source = null;
  let again;
  const heard = () => {
    silentSince = null;
    heardAt = Date.now();
    say("");
  };
  const open = () => {
    clearTimeout(again);
    heardAt = Date.now();
    source = new EventSource(address);
    source.addEventListener("alive", heard);
    source.addEventListener("parts", (event) => {
      heard();
      document.documentElement.dataset.liveAt = String(Date.now());
      for (const [id, html] of Object.entries(JSON.parse(event.data))) window.everbeat.replace(id, html);
    });
    source.addEventListener("away", (event) => {
      heardAt = Date.now();
      say(`Not live: ${JSON.parse(event.data).problem.replace(/\.?$/, ".")} This page shows its last state.`);
    });
    source.addEventListener("error", (event) => {
      if (event.target !== source) return;
      silentSince ??= Date.now();
      // The browser connects again by itself, but not after an answer with an error, such as that of a proxy whose server restarts.
      const isRefused = source.readyState === EventSource.CLOSED;
      if (isRefused) again = setTimeout(open, AGAIN_MS);
      if (isRefused || Date.now() - silentSince >= QUIET_MS) say(UNANSWERED);
    });
  };
  const close = () => {
    clearTimeout(again);
    source?.close();
    source = null;
  };
  const follow = () => {
    if (document.hidden) close();
    else if (!source) open();
  };
  // A connection without a peer causes no error for minutes.
  setInterval(() => {
    if (source && Date.now() - heardAt >= SILENT_MS) say(UNANSWERED);
  }, 1000);
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) window.location.reload();
  });
  follow();
}
