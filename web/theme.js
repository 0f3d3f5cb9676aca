// Dark or light: the system's theme, or the user's choice.

const KEPT = "homenode.theme";
const THEMES = { system: "◐", light: "☀", dark: "☾" };

function apply(theme, button) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  button.textContent = THEMES[theme];
  const label = theme === "system" ? "Colours: as the system has them" : `Colours: ${theme}`;
  button.setAttribute("aria-label", label);
  button.title = `${label} (t)`;
}

// The button that switches to the next theme.
export function theme(button) {
  const names = Object.keys(THEMES);
  const kept = localStorage.getItem(KEPT);
  let now = names.includes(kept) ? kept : "system";
  apply(now, button);
  button.addEventListener("click", () => {
    now = names[(names.indexOf(now) + 1) % names.length];
    localStorage.setItem(KEPT, now);
    apply(now, button);
  });
}
