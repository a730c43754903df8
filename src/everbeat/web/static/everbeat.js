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
  for (const mark of within.querySelectorAll("text[data-at]")) {
    const moment = new Date(mark.dataset.at);
    if (!Number.isNaN(moment.getTime())) mark.textContent = moment.toTimeString().slice(0, 8);
  }
  for (const zone of within.querySelectorAll("[data-zone]")) zone.textContent = " local";
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

// ---------- short addresses: an empty field of a filter is not a part of the link ----------
document.addEventListener("formdata", (event) => {
  if (event.target.method !== "get") return;
  for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
});

// ---------- copying ----------
function offerCopies(within) {
  if (!navigator.clipboard) return;
  for (const button of within.querySelectorAll("button.copy")) button.hidden = false;
}

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest("button.copy") : null;
  const text = button && "copyLink" in button.dataset ? window.location.href : button?.dataset.copy;
  if (text) navigator.clipboard.writeText(text).catch(() => {});
});

// ---------- ticked rows ----------
document.addEventListener("change", (event) => {
  const box = event.target;
  if (!(box instanceof HTMLInputElement) || !box.matches("[data-ticks]")) return;
  for (const other of document.querySelectorAll(`input[name="${CSS.escape(box.dataset.ticks)}"]`)) other.checked = box.checked;
});

// ---------- pages of which a part is not ready ----------
// The page is loaded again when the part can be ready, but not while somebody uses it, and not unseen.
function loadAgain() {
  const isUsed = document.getElementById("main").contains(document.activeElement);
  if (isUsed || document.hidden) window.setTimeout(loadAgain, LONGEST_PAUSE_MS);
  else window.location.reload();
}

if (root.dataset.refresh) window.setTimeout(loadAgain, 1000 * Number(root.dataset.refresh));

// ---------- parts that a script replaces ----------
function replace(id, html) {
  const place = document.getElementById(id);
  if (!place) return;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const href = focused?.getAttribute("href");
  const key = focused?.id;
  place.innerHTML = html;
  localise(place);
  offerCopies(place);
  if (!focused) return;
  const again = key ? document.getElementById(key) : href ? place.querySelector(`[href="${CSS.escape(href)}"]`) : null;
  again?.focus({ preventScroll: true });
}

localise(document);
offerCopies(document);
window.everbeat = { localise, offerCopies, replace };
