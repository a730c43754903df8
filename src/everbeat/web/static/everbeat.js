// The script of all pages. Each page also works without it: it adds keys, local times, copying and questions before actions.
"use strict";

const root = document.documentElement;
const LONGEST_PAUSE_MS = 1500;

// ---------- times ----------
const two = (value) => String(value).padStart(2, "0");

function shown(moment, form) {
  const now = new Date();
  const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
  const time = `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
  if (form === "precise") return `${day} ${time}.${String(moment.getMilliseconds()).padStart(3, "0")}`;
  return moment.toDateString() === now.toDateString() ? time : `${day} ${time}`;
}

// Show local times in all elements below `within`. A script that replaces a part of the page calls it again for that part.
function localise(within) {
  if (root.dataset.clock !== "local") return;
  for (const element of within.querySelectorAll("time[datetime][data-form]")) {
    const moment = new Date(element.dateTime);
    if (!Number.isNaN(moment.getTime())) element.textContent = shown(moment, element.dataset.form);
  }
}

// ---------- keys ----------
let pressedAt = -Infinity;

function isTyping(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(input|select|textarea)$/i.test(target.tagName));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.key === "Escape" && isTyping(event.target)) event.target.blur();
  if (isTyping(event.target)) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("search")?.focus();
  } else if (event.key === "g") {
    pressedAt = event.timeStamp;
  } else if (event.timeStamp - pressedAt < LONGEST_PAUSE_MS) {
    pressedAt = -Infinity;
    document.querySelector(`.nav a[data-key="${CSS.escape(event.key)}"]`)?.click();
  }
});

// ---------- questions before actions ----------
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.asks ?? event.target.dataset.asks;
  if (question && !window.confirm(question)) event.preventDefault();
});

// ---------- copying ----------
function offerCopies(within) {
  if (!navigator.clipboard) return;
  for (const button of within.querySelectorAll("button.copy")) button.hidden = false;
}

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest("button.copy") : null;
  if (button) navigator.clipboard.writeText(button.dataset.copy).catch(() => {});
});

// ---------- ticked rows ----------
document.addEventListener("change", (event) => {
  const box = event.target;
  if (!(box instanceof HTMLInputElement) || !box.matches("[data-ticks]")) return;
  for (const other of document.querySelectorAll(`input[name="${CSS.escape(box.dataset.ticks)}"]`)) other.checked = box.checked;
});

localise(document);
offerCopies(document);
window.everbeat = { localise, offerCopies };
