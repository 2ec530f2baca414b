// Before anything is drawn: dark or light, if somebody has chosen.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing follows its system.
}
