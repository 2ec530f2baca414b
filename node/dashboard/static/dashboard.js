// Keeps the sections of a page as the network is, shows what things are when they are pointed at, and turns the lights
// on and off. Without it every page is there all the same, as it was when it was loaded.

const EVERY_MS = 1000;
const SLOWEST_MS = 15000;

const live = document.getElementById("live");
const state = document.getElementById("state");
const tip = document.getElementById("tip");
const ownName = state?.textContent;
let pause = EVERY_MS;

function sections() {
  return [...live.querySelectorAll("[data-section]")];
}

// What is drawn anew looks the same to whoever was in the middle of it: the focus and the places of scrolled tables stay.
function replace(section, { html, digest }) {
  const focused = section.contains(document.activeElement) ? document.activeElement : null;
  const again = focused && [...section.querySelectorAll(focused.tagName)].indexOf(focused);
  const scrolled = [...section.querySelectorAll(".scroll")].map((part) => [part.scrollLeft, part.scrollTop]);
  section.innerHTML = html;
  section.dataset.digest = digest;
  section.querySelectorAll(".scroll").forEach((part, number) => {
    [part.scrollLeft, part.scrollTop] = scrolled[number] ?? [0, 0];
  });
  if (focused) section.querySelectorAll(focused.tagName)[again]?.focus({ preventScroll: true });
  hideTip();
}

function isBusy(section) {
  const selected = document.getSelection();
  return (selected && !selected.isCollapsed && section.contains(selected.anchorNode)) || (pointed && section.contains(pointed));
}

async function look() {
  const digests = sections().map((section) => section.dataset.digest).join(",");
  const answer = await fetch(live.dataset.news, { headers: { "x-have": digests }, cache: "no-store" });
  if (answer.status === 401) location.reload();
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  for (const section of sections()) {
    const news = told.sections[section.dataset.section];
    if (news && !isBusy(section)) replace(section, news);
  }
}

async function keepLooking() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    try {
      await look();
      pause = EVERY_MS;
      state.textContent = ownName;
      state.className = "";
    } catch (error) {
      pause = Math.min(2 * pause, SLOWEST_MS);
      state.textContent = error instanceof TypeError ? "no connection, trying again" : error.message;
      state.className = "bad";
    }
  }
}

let pointed = null;

function showTip(target, x, y) {
  pointed = target;
  tip.textContent = target.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
  const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
  Object.assign(tip.style, { left: `${left}px`, top: `${Math.max(8, top)}px` });
  light(target, true);
}

function hideTip() {
  if (pointed) light(pointed, false);
  pointed = null;
  tip.hidden = true;
}

// A box and its links, or a link and its boxes, stand out together.
function light(target, on) {
  const map = target.closest?.("svg.map");
  if (!map) return;
  const key = target.dataset.key;
  map.classList.toggle("lit", on);
  for (const part of map.querySelectorAll("[data-ends]")) {
    const ends = part.dataset.ends.split(" ");
    part.classList.toggle("lit", on && (key ? ends.includes(key) : part.dataset.ends === target.dataset.ends));
  }
}

document.addEventListener("pointerover", (event) => {
  const target = event.target.closest?.("[data-tip]");
  if (target) showTip(target, event.clientX, event.clientY);
  else if (pointed && event.pointerType === "mouse") hideTip();
});
document.addEventListener("focusin", (event) => {
  const target = event.target.closest?.("[data-tip]");
  if (!target || !event.target.matches(":focus-visible")) return;
  const box = target.getBoundingClientRect();
  showTip(target, box.left, box.bottom - 10);
});
document.addEventListener("focusout", hideTip);
document.addEventListener("pointerdown", (event) => {
  if (pointed && !event.target.closest?.("[data-tip]")) hideTip();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
document.addEventListener("change", (event) => {
  if (event.target.matches("form.filter[method=get] select")) event.target.form.requestSubmit();
});

const root = document.documentElement;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {
    // A browser that keeps nothing forgets it with the page.
  }
});

if (live) keepLooking();
