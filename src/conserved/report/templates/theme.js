(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("scripted");
  let kept = null;
  try { kept = localStorage.getItem("conserved-theme"); } catch { /* a page from a file may have no storage */ }
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
})();
