// Keeps a live page up to date. Its parts arrive as server-sent events and replace the elements with their ids. The browser reconnects.
"use strict";

const live = document.querySelector("[data-live]");
const isCalm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
const QUIET_MS = 5000;
const AGAIN_MS = 3000;
const SILENT_MS = 10000;
const UNANSWERED = "Not live: the dashboard does not answer. This page shows its last state.";

function replace(id, html) {
  const place = document.getElementById(id);
  if (!place) return;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const href = focused?.getAttribute("href");
  const key = focused?.id;
  place.innerHTML = html;
  window.everbeat.localise(place);
  window.everbeat.offerCopies(place);
  if (!focused) return;
  const again = key ? document.getElementById(key) : href ? place.querySelector(`[href="${CSS.escape(href)}"]`) : null;
  again?.focus({ preventScroll: true });
}

if (live) {
  const address = new URL(live.dataset.live, document.baseURI);
  if (isCalm) address.searchParams.set("calm", "1");
  const state = document.getElementById("live-state");
  let silentSince = null;
  let heardAt = Date.now();
  const say = (text) => {
    if (state && state.textContent !== text) state.textContent = text;
  };
  let source;
  let again;
  const connect = () => {
    source = new EventSource(address);
    const heard = () => {
      silentSince = null;
      heardAt = Date.now();
      say("");
    };
    source.addEventListener("alive", heard);
    source.addEventListener("parts", (event) => {
      heard();
      document.documentElement.dataset.liveAt = String(Date.now());
      for (const [id, html] of Object.entries(JSON.parse(event.data))) replace(id, html);
    });
    source.addEventListener("away", (event) => {
      heardAt = Date.now();
      say(`Not live: ${JSON.parse(event.data).problem}`);
    });
    source.addEventListener("error", () => {
      silentSince ??= Date.now();
      // The browser connects again by itself, but not after an answer with an error, such as that of a proxy whose server restarts.
      const isRefused = source.readyState === EventSource.CLOSED;
      if (isRefused) again = setTimeout(connect, AGAIN_MS);
      if (isRefused || Date.now() - silentSince >= QUIET_MS) say(UNANSWERED);
    });
  };
  connect();
  // A connection without a peer causes no error for minutes.
  setInterval(() => {
    if (Date.now() - heardAt >= SILENT_MS) say(UNANSWERED);
  }, 1000);
  window.addEventListener("pagehide", () => {
    clearTimeout(again);
    source.close();
  });
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) window.location.reload();
  });
}
