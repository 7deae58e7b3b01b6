(() => {
  "use strict";
  const root = document.documentElement;
  const specifications = JSON.parse(document.getElementById("plot-data").textContent);
  const boxes = [...document.querySelectorAll("[data-plot]")];
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Set();
  let printing = false;

  const theme = () => printing ? "light" : root.dataset.theme || (darkness.matches ? "dark" : "light");
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function template() {
    const ink = colour("--ink"), muted = colour("--muted"), rule = colour("--rule"), card = colour("--card");
    const axis = {
      gridcolor: rule, linecolor: rule, zerolinecolor: rule, tickcolor: rule, automargin: true,
      exponentformat: "power", tickfont: { color: muted, size: 11.5 }, title: { font: { color: muted, size: 12.5 }, standoff: 8 },
    };
    const ramp = [0, 1, 2, 3, 4].map((step) => [step / 4, colour(`--ramp-${step}`)]);
    const map = [{ colorscale: ramp, colorbar: { tickfont: { color: muted } } }];
    return {
      layout: {
        font: { family: colour("--sans"), color: ink, size: 12.5 },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        colorway: [1, 2, 3, 4, 5, 6, 7, 8].map((number) => colour(`--line-${number}`)),
        margin: { l: 56, r: 14, t: 14, b: 44 },
        xaxis: axis, yaxis: axis,
        legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { color: ink, size: 11.5 } },
        hoverlabel: { bgcolor: card, bordercolor: rule, font: { color: ink } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
        annotationdefaults: { font: { color: ink } },
        polar: { bgcolor: "rgba(0,0,0,0)" },
      },
      data: { heatmap: map, contour: map, histogram2d: map },
    };
  }

  /* A specification may name a colour of the page, var(--muted), which changes with light and dark. */
  function coloured(value) {
    if (typeof value === "string") {
      const named = /^var\((--[a-z0-9-]+)\)$/.exec(value);
      return named ? colour(named[1]) : value;
    }
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" ? value : value.map(coloured);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v)]));
    return value;
  }

  const touched = matchMedia("(pointer: coarse)");

  function layoutOf(box, specification) {
    const layout = { ...specification.layout, template: template() };
    // The title stands above the plot as a heading, where it can wrap and be linked to.
    delete layout.title;
    delete layout.width;
    layout.autosize = true;
    layout.height = layout.height || (box.classList.contains("small") ? 300 : 380);
    if (touched.matches) layout.dragmode = false;
    for (const axis of Object.values(layout)) {
      // One label a decade is too many for a range of twenty.
      if (axis && axis.type === "log" && axis.dtick === 1) { delete axis.dtick; axis.nticks = 8; }
    }
    if (layout.legend && layout.legend.y < 0) {
      // Below the titles of the lowest axes, however high the figure is.
      const inner = layout.height - 110;
      layout.legend = { ...layout.legend, x: 0, y: -58 / inner, yanchor: "top" };
    }
    const panels = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key)).length;
    box.style.minWidth = panels > 1 && !printing ? `${Math.min(panels, 3) * 250}px` : "";
    return layout;
  }

  const settings = {
    // Plotly would offer to upload the data of a plot; a report keeps to itself.
    showSendToCloud: false,
    responsive: true, displaylogo: false, displayModeBar: touched.matches ? false : "hover", showTips: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "sendChartToCloud", "downloadJson"],
  };

  function draw(box) {
    const specification = specifications[box.dataset.plot];
    if (!specification) return Promise.resolve();
    drawn.add(box);
    const copy = coloured(structuredClone(specification));
    return Plotly.react(box, copy.data, layoutOf(box, copy), settings).then(() => box.setAttribute("data-drawn", ""));
  }

  const redraw = () => Promise.all([...drawn].map(draw));

  /* Plots near the screen come first; the others while the reader reads, so that printing finds them all. */
  const pending = new Set(boxes);
  function drawOnce(box) {
    if (!pending.delete(box)) return Promise.resolve();
    return draw(box);
  }
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); drawOnce(entry.target); }
  }, { rootMargin: "600px" });
  boxes.forEach((box) => near.observe(box));
  const later = window.requestIdleCallback || ((work) => setTimeout(work, 30));
  function next() {
    const [box] = pending;
    if (!box) { root.dataset.plots = "drawn"; return; }
    drawOnce(box).finally(() => later(next));
  }
  later(next);

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
    redraw();
  });
  darkness.addEventListener("change", () => { label(); redraw(); });
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
      if (event.key === "/" && !typing) { event.preventDefault(); filter.elements.text.focus(); }
    });
    apply();
  }
  unfold();

  /* On paper: light colours, everything unfolded, plots as wide as the page. */
  let folded = [];
  addEventListener("beforeprint", () => {
    printing = true;
    root.classList.add("printing");
    folded = [...document.querySelectorAll("main details:not([open], .numbers)")];
    folded.forEach((box) => { box.open = true; });
    for (const box of boxes) {
      pending.delete(box);
      draw(box);
      Plotly.relayout(box, { autosize: false, width: box.classList.contains("small") ? 330 : 670 });
    }
  });
  addEventListener("afterprint", () => {
    printing = false;
    root.classList.remove("printing");
    folded.forEach((box) => { box.open = false; });
    redraw();
  });
})();
