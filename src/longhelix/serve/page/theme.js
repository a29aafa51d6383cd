// Before anything is painted: the theme that was chosen, if one was.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("longhelix-theme");
  } catch {
    // a browser that keeps nothing
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
