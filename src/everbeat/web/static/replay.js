// Replays the minutes around a past moment. Without it, the links beside the control lead from moment to moment.
// One request is open at a time, and one is sent a second at most. A hidden tab pauses.
"use strict";

const control = document.querySelector("[data-replay]");
const EACH_MS = 1000;
const PARTS = ["as-of-now", "as-of-lead", "as-of-says", "as-of-steps", "past"];
const FAILED = "The replay stopped, because the dashboard did not answer. This page shows the last moment that was read.";

if (control) {
  const banner = document.getElementById("as-of");
  const button = control.querySelector("button");
  const slider = control.querySelector("input");
  const shownMoment = control.querySelector(".moment");
  const state = control.querySelector("[role=status]");
  const since = Date.parse(control.dataset.since);
  const isCalm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  let isPlaying = false;
  let isLoading = false;
  let sentAt = -Infinity;
  let wanted = null;
  let timer;

  const momentOf = (second) => new Date(since + 1000 * second);
  const written = (moment) => moment.toISOString().replace(".000Z", "Z");
  const isAtEnd = () => Number(slider.value) >= Number(slider.max);

  const addressOf = (moment) => {
    const address = new URL(window.location.href);
    address.searchParams.set("at", written(moment));
    address.searchParams.set("around", control.dataset.around);
    address.searchParams.delete("play");
    return address;
  };

  const tell = (moment = momentOf(Number(slider.value))) => {
    const isLocal = document.documentElement.dataset.clock === "local";
    const text = isLocal ? moment.toTimeString().slice(0, 8) : `${moment.toISOString().slice(11, 19)} UTC`;
    shownMoment.textContent = text;
    slider.setAttribute("aria-valuetext", text);
  };

  const setPlaying = (plays) => {
    isPlaying = plays;
    button.querySelector("span").textContent = plays ? "Pause" : "Play";
    button.querySelector("use").setAttribute("href", plays ? "#i-pause" : "#i-play");
  };

  // Tables of numbers that the reader has opened stay open.
  const replaced = (html) => {
    const found = new DOMParser().parseFromString(html, "text/html");
    const opened = [...document.querySelectorAll("#past details")].map((each) => each.open);
    for (const id of PARTS) {
      const part = found.getElementById(id);
      if (part) window.everbeat.replace(id, part.innerHTML);
    }
    const details = document.querySelectorAll("#past details");
    if (details.length === opened.length) details.forEach((each, place) => (each.open = opened[place]));
  };

  // The links of the frame lead to the same pages of the moment that is shown.
  const aim = (moment) => {
    window.history.replaceState(null, "", addressOf(moment));
    for (const link of document.querySelectorAll(".side a, .top a")) {
      const address = new URL(link.href);
      if (!address.searchParams.has("at")) continue;
      address.searchParams.set("at", written(moment));
      link.href = address.pathname + address.search + address.hash;
    }
  };

  const load = async () => {
    const second = wanted;
    wanted = null;
    isLoading = true;
    sentAt = performance.now();
    try {
      const moment = momentOf(second);
      const answer = await fetch(addressOf(moment), { headers: { accept: "text/html", "x-everbeat-part": "1" } });
      const html = await answer.text();
      if (!answer.ok) throw new Error(answer.statusText);
      replaced(html);
      aim(moment);
      control.dataset.shown = written(moment);
      state.textContent = "";
    } catch {
      setPlaying(false);
      wanted = null;
      state.textContent = FAILED;
    }
    isLoading = false;
    follow();
  };

  // Load what is wanted, or the next moment if the replay plays, as soon as the last request has ended and a second has passed.
  const follow = () => {
    clearTimeout(timer);
    if (isLoading) return;
    if (wanted === null && isPlaying && isAtEnd()) setPlaying(false);
    if (wanted === null && !isPlaying) return;
    const rest = sentAt + EACH_MS - performance.now();
    if (rest > 0) {
      timer = setTimeout(follow, rest);
      return;
    }
    if (wanted === null) {
      slider.value = String(Number(slider.value) + Number(slider.step));
      wanted = Number(slider.value);
      tell();
    }
    load();
  };

  button.addEventListener("click", () => {
    if (!isPlaying && isAtEnd()) {
      slider.value = "0";
      wanted = 0;
      tell();
    }
    setPlaying(!isPlaying);
    follow();
  });
  slider.addEventListener("input", () => {
    setPlaying(false);
    wanted = Number(slider.value);
    tell();
    follow();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) setPlaying(false);
  });

  banner.setAttribute("aria-live", "off");  // not a message each second
  control.hidden = false;
  tell(new Date(control.dataset.at));
  if ("plays" in control.dataset && !isCalm) {
    setPlaying(true);
    follow();
  }
}
