"use strict";
// What the scripts of all pages share. `begin(drawAll)` comes last in each: it unpacks plotly.js, and draws.
const { byId, isKnown, plain, colour, axis, drawIn, begin } = (() => {
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  const isKnown = (value) => value !== null && value !== undefined;
  // Plotly reads some markup in its texts; what comes from a model is none.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // ---- light and dark ----

  const stored = (() => { try { return localStorage.getItem("scalewright-theme"); } catch { return null; } })();
  const asSystem = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = stored === "dark" || stored === "light" ? stored : asSystem.matches ? "dark" : "light";
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  function heedTheme(drawAll) {
    let chosen = stored !== null;
    const paint = (theme) => { root.dataset.theme = theme; drawAll(); };
    byId("theme").addEventListener("click", () => {
      const theme = root.dataset.theme === "dark" ? "light" : "dark";
      chosen = true;
      try { localStorage.setItem("scalewright-theme", theme); } catch { /* a page from a file may have no storage */ }
      paint(theme);
    });
    asSystem.addEventListener("change", (event) => { if (!chosen) paint(event.matches ? "dark" : "light"); });
  }

  // ---- drawing ----

  const axis = (given = {}) => ({ gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, ...given });
  const drawIn = (id, traces, given) => Plotly.react(byId(id), traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("text") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") }, align: "left" },
    colorway: ["#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#9a8c1a", "#7f7f7f"], // told apart by all eyes
    ...given,
  }, { displaylogo: false, responsive: true, displayModeBar: false });

  // ---- plotly.js, which came compressed ----

  async function unpack() {
    const bytes = Uint8Array.from(atob(byId("plotly").textContent), (each) => each.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    byId("plotly").remove();
  }

  function begin(drawAll) {
    heedTheme(drawAll);
    unpack().then(() => {
      drawAll();
      root.dataset.drawn = "yes";
    }).catch((error) => {
      for (const each of document.querySelectorAll(".chart")) each.textContent = "This browser cannot draw the charts: it is older than 2023.";
      console.error(error);
    });
  }

  return { byId, isKnown, plain, colour, axis, drawIn, begin };
})();
