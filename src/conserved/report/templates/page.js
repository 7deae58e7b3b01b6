(() => {
  "use strict";
  const root = document.documentElement;
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (darkness.matches ? "dark" : "light");

  /* Light and dark. */
  const toggle = document.getElementById("theme");
  function label() {
    const other = theme() === "dark" ? "light" : "dark";
    toggle.setAttribute("aria-label", `Switch to ${other} colours`);
    toggle.title = toggle.getAttribute("aria-label");
  }
  toggle.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("conserved-theme", root.dataset.theme); } catch { /* as above */ }
    label();
  });
  darkness.addEventListener("change", label);
  label();

  /* The menu on a narrow screen. */
  const menu = document.getElementById("menu");
  const contents = document.getElementById("contents");
  function open(wanted) {
    menu.setAttribute("aria-expanded", String(wanted));
    contents.classList.toggle("open", wanted);
  }
  menu.addEventListener("click", () => open(menu.getAttribute("aria-expanded") !== "true"));
  contents.addEventListener("click", (event) => { if (event.target.closest("a")) open(false); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && contents.classList.contains("open")) { open(false); menu.focus(); }
  });

  /* Where the reader is. */
  const links = new Map([...contents.querySelectorAll("a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.get(entry.target.id);
      if (!link || !entry.isIntersecting) continue;
      links.forEach((other) => other.removeAttribute("aria-current"));
      link.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  links.forEach((_, id) => { const target = document.getElementById(id); if (target) seen.observe(target); });

  /* A link into something folded opens it. */
  function unfold() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.hidden && target.matches(".claim")) reset();
    for (let box = target; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
  }
  addEventListener("hashchange", unfold);

  /* Claims by text, source and verdict. */
  const filter = document.getElementById("claim-filter");
  const cards = [...document.querySelectorAll(".claim")];
  const texts = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));
  function apply() {
    const words = filter.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const source = filter.elements.source.value, verdict = filter.elements.verdict.value;
    let count = 0;
    for (const card of cards) {
      const fits = words.every((word) => texts.get(card).includes(word))
        && (!source || card.dataset.source === source) && (!verdict || card.dataset.verdict === verdict);
      card.hidden = !fits;
      count += fits;
    }
    document.getElementById("claim-count").textContent =
      count === cards.length ? `All ${count} claims` : `${count} of ${cards.length} claims`;
    document.getElementById("no-claim").hidden = count > 0;
  }
  function reset() { if (filter) { filter.reset(); apply(); } }
  if (filter) {
    filter.addEventListener("submit", (event) => event.preventDefault());
    filter.addEventListener("input", apply);
    filter.addEventListener("change", apply);
    filter.addEventListener("reset", () => setTimeout(apply));
    document.addEventListener("keydown", (event) => {
      const typing = event.target.closest("input, select, textarea");
      if (event.key === "/" && !typing) {
        event.preventDefault();
        document.getElementById("all-claims").open = true;
        filter.elements.text.focus();
      }
    });
    apply();
  }
  unfold();

  /* On paper: light colours, everything unfolded. */
  let folded = [];
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    folded = [...document.querySelectorAll("main details:not([open], .numbers)")];
    folded.forEach((box) => { box.open = true; });
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    folded.forEach((box) => { box.open = false; });
  });
  root.dataset.plots = "drawn";
})();
