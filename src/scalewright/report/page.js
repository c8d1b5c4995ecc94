"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const columns = data.columns;
  const count = columns.name.length;
  const LARGEST = 1e6; // larger numbers stand for infinity

  const fixed = (digits, unit = "") => (value) =>
    !isKnown(value) ? "–" : Math.abs(value) >= LARGEST ? (value < 0 ? "−∞" : "∞") : value.toFixed(digits).replace("-", "−") + unit;
  const short = (value) => (Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : Number(value.toPrecision(3)).toString()).replace("-", "−");

  const METRICS = {
    output_db: { title: "signal to noise of outputs", unit: "dB", show: fixed(1, " dB"), isGood: true },
    weight_db: { title: "signal to noise of weights", unit: "dB", show: fixed(1, " dB"), isGood: true },
    above_optimum: { title: "above the optimum", unit: "%", show: (value) => (isKnown(value) ? fixed(2, " %")(100 * value) : "–"), times: 100, isGood: false },
    gain_db: { title: "gain over min-max", unit: "dB", show: fixed(2, " dB"), isGood: true },
    bits: { title: "bits per weight", unit: "", show: fixed(2), isGood: true },
  };
  const known = Object.keys(METRICS).filter((key) => columns[key].some(isKnown));

  const draw = (id, traces, given) => drawIn(id, traces, { margin: { l: 60, r: 16, t: 16, b: 52 }, showlegend: false, ...given });

  const stacks = [...new Set(columns.stack)];
  const rowOf = (number) => (stacks.filter(Boolean).length > 1 && columns.stack[number] ? `${columns.stack[number]} · ` : "") + columns.kind[number];
  const numbers = [...Array(count).keys()];
  const rows = [...new Set(numbers.map(rowOf))];
  const depths = [...new Set(columns.depth.filter(isKnown))].sort((a, b) => a - b);
  const places = [...(columns.depth.every(isKnown) ? [] : [null]), ...depths];

  function drawHeat() {
    const metric = METRICS[byId("metric").value];
    const values = columns[byId("metric").value];
    const worse = (a, b) => (!isKnown(a) || (isKnown(b) && (metric.isGood ? b < a : b > a)) ? b : a);
    const at = new Map(numbers.map((number) => [number, [rows.indexOf(rowOf(number)), places.indexOf(columns.depth[number])]]));
    const grid = () => rows.map(() => places.map(() => null));
    const [z, who] = [grid(), grid()];
    for (const [number, [row, place]] of at) {
      if (!isKnown(values[number])) continue;
      const better = z[row][place];
      z[row][place] = worse(better, values[number]);
      if (z[row][place] !== better) who[row][place] = number;
    }
    const finite = z.flat().filter((value) => isKnown(value) && Math.abs(value) < LARGEST);
    const times = metric.times || 1;
    const [low, high] = finite.length ? [Math.min(...finite) * times, Math.max(...finite) * times] : [0, 1];
    const scale = [[0, colour("good")], [0.5, colour("middle")], [1, colour("bad")]];
    const texts = who.map((line) => line.map((number) => (number === null ? "" :
      `<b>${plain(columns.name[number])}</b><br>${known.map((key) => `${METRICS[key].title} ${METRICS[key].show(columns[key][number])}`).join("<br>")}`)));
    const place = byId("heat");
    place.style.height = `${Math.max(200, 110 + 30 * rows.length)}px`;
    draw("heat", [{
      type: "heatmap", x: places.map((depth) => (depth === null ? "–" : String(depth))), y: rows.map(plain),
      z: z.map((line) => line.map((value) => (isKnown(value) ? Math.min(value * times, high) : null))), customdata: who, text: texts, hovertemplate: "%{text}<extra></extra>", hoverongaps: false,
      zmin: low, zmax: high === low ? low + 1 : high, colorscale: metric.isGood ? scale.map(([stop, paint]) => [1 - stop, paint]).reverse() : scale,
      xgap: depths.length > 60 ? 0 : 2, ygap: 2, colorbar: { title: { text: metric.unit, side: "top" }, thickness: 12, outlinewidth: 0, len: 1 },
    }], {
      xaxis: axis({ type: "category", title: { text: "depth", standoff: 8 }, showgrid: false, nticks: 30 }),
      yaxis: axis({ type: "category", autorange: "reversed", showgrid: false }),
      margin: { l: 60, r: 8, t: 12, b: 52 },
    });
    if (!place.dataset.clickable) {
      place.dataset.clickable = "yes";
      place.on("plotly_click", ({ points }) => { if (isKnown(points[0].customdata)) pick(points[0].customdata, false); });
    }
  }

  // ---- values of one layer ----

  const pictured = Object.keys(data.pictures).map(Number);
  let picked = pictured[0];

  function drawValues() {
    const pictures = data.pictures[picked];
    const figures = known.map((key) => `${METRICS[key].title} ${METRICS[key].show(columns[key][picked])}`);
    byId("picked-figures").textContent = [columns.shape[picked], columns.weights[picked], columns.observers[picked], ...figures].filter(Boolean).join(" · ");
    drawPicture("weight-values", "weight", pictures.weight, "weights");
    drawPicture("input-values", "input", pictures.input, "inputs");
    byId("input-values").hidden = !pictures.input;
    byId("input-values").parentElement.style.gridTemplateColumns = pictures.input && pictures.weight ? "" : "1fr";
    byId("weight-values").hidden = !pictures.weight;
    const ratios = pictures.weight && pictures.weight.ratios;
    byId("ratios").hidden = !ratios;
    if (!ratios) return;
    const all = ratios.reduce((sum, each) => sum + each, 0);
    const last = ratios.reduce((found, each, number) => (each ? number : found), 20) + 1;
    draw("ratios", [{
      type: "bar", x: ratios.map((_, number) => number / 20).slice(0, last + 1), y: ratios.map((each) => (100 * each) / all).slice(0, last + 1), marker: { color: colour("bar") },
      hovertemplate: "%{y:.1f} % of the scales<br>are %{x:.2f} of min-max's<extra></extra>",
    }], {
      title: { text: "chosen scales, as shares of min-max's", font: { size: 14 }, x: 0.02, xanchor: "left" }, margin: { l: 60, r: 16, t: 44, b: 52 }, bargap: 0.08,
      xaxis: axis({ title: { text: "1 is min-max; less clips the largest values", standoff: 8 }, range: [-0.03, Math.max(1.08, last / 20 + 0.03)] }),
      yaxis: axis({ title: { text: "% of scales", standoff: 8 } }),
      shapes: [line(1, colour("soft"), "dot")],
    });
  }

  const line = (x, paint, dash) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: paint, width: 2, dash } });

  function drawPicture(id, name, picture, title) {
    if (!picture) return;
    const bins = picture.counts.length;
    const width = (picture.to - picture.from) / bins;
    const centres = picture.counts.map((_, number) => picture.from + (number + 0.5) * width);
    const all = picture.counts.reduce((sum, each) => sum + each, 0) + (picture.below || 0) + (picture.above || 0);
    const isLog = byId("log").checked;
    const shares = picture.counts.map((each) => (each || !isLog ? (100 * each) / all : null));
    const ends = [picture.from, picture.to, ...(picture.chosen || [])];
    if (byId("whole").checked) ends.push(picture.min, picture.max);
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    const margin = 0.03 * (high - low) || 1e-6;
    const minmax = `min-max ${short(picture.min)} … ${short(picture.max)}`;
    const traces = [{
      type: "bar", name: title, x: centres, y: shares, width, marker: { color: colour("bar") }, showlegend: false,
      customdata: centres.map((centre) => [short(centre - width / 2), short(centre + width / 2)]),
      hovertemplate: "%{y:.3g} % from %{customdata[0]} to %{customdata[1]}<extra></extra>",
    }];
    const shapes = [line(picture.min, colour("soft"), "dot"), line(picture.max, colour("soft"), "dot")];
    const legend = [[minmax, colour("soft"), "dot"]];
    if (picture.chosen) {
      shapes.push(...picture.chosen.map((end) => line(end, colour("accent"), "solid")));
      legend.push([`${picture.typical ? "widest range" : "chosen range"} ${short(picture.chosen[0])} … ${short(picture.chosen[1])}`, colour("accent"), "solid"]);
    }
    if (picture.typical) {
      shapes.unshift({ type: "rect", x0: picture.typical[0], x1: picture.typical[1], y0: 0, y1: 1, yref: "paper", line: { width: 0 }, fillcolor: colour("accent"), opacity: 0.13, layer: "below" });
      legend.push([`median range ${short(picture.typical[0])} … ${short(picture.typical[1])}`, colour("accent"), null]);
    }
    for (const [text, paint, dash] of legend) {
      const look = dash ? { mode: "lines", line: { color: paint, dash, width: 2 } } : { mode: "markers", marker: { color: paint, opacity: 0.3, symbol: "square", size: 11 } };
      traces.push({ type: "scatter", x: [null], y: [null], name: text, showlegend: true, hoverinfo: "skip", ...look });
    }
    draw(id, traces, {
      title: { text: picture.chosen ? title : `${title}, without a fixed range`, font: { size: 14 }, x: 0.02, xanchor: "left" },
      bargap: 0, showlegend: true, legend: { orientation: "h", y: -0.2, x: 0, font: { size: 11 } }, margin: { l: 60, r: 16, t: 44, b: 80 },
      xaxis: axis({ range: [low - margin, high + margin] }),
      yaxis: axis({ type: isLog ? "log" : "linear", title: { text: "% of values", standoff: 8 }, exponentformat: "power", ...(isLog ? { dtick: 1 } : {}) }), shapes,
    });
  }

  function pick(number, isToScroll) {
    if (!data.pictures[number]) return;
    picked = number;
    byId("picked").value = String(number);
    drawValues();
    if (isToScroll) byId("values").scrollIntoView();
  }

  // ---- the rest ----

  function drawAbove() {
    const by = new Map();
    for (const number of numbers) if (isKnown(columns.above_optimum[number])) by.set(rowOf(number), [...(by.get(rowOf(number)) || []), number]);
    const x = (number) => (isKnown(columns.depth[number]) ? columns.depth[number] : -1);
    draw("above", [...by].map(([row, some]) => ({
      type: "scatter", mode: "markers", name: plain(row), x: some.map(x), y: some.map((number) => 100 * columns.above_optimum[number]), marker: { size: 8, opacity: 0.85 },
      text: some.map((number) => plain(columns.name[number])), hovertemplate: "<b>%{text}</b><br>%{y:.2f} % above the optimum<extra></extra>",
    })), { showlegend: by.size <= 16, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, xaxis: axis({ title: { text: "depth", standoff: 8 }, zeroline: false, ...(depths.length <= 16 ? { dtick: 1 } : {}) }), yaxis: axis({ title: { text: "% above the optimum", standoff: 8 }, rangemode: "tozero" }) });
  }

  const experts = numbers.filter((number) => isKnown(columns.expert[number]) && isKnown(columns.num_tokens[number]));

  function drawExperts() {
    const width = Math.max(...experts.map((number) => columns.expert[number])) + 1;
    const deep = [...new Set(experts.map((number) => columns.depth[number]))].sort((a, b) => a - b);
    const z = deep.map(() => Array(width).fill(null));
    for (const number of experts) {
      const row = z[deep.indexOf(columns.depth[number])];
      row[columns.expert[number]] = Math.max(row[columns.expert[number]] || 0, columns.num_tokens[number]);
    }
    const all = z.flat().filter(isKnown);
    const none = all.filter((each) => each === 0).length;
    const mean = all.reduce((sum, each) => sum + each, 0) / all.length;
    byId("experts-text").textContent = `How many tokens of the data chose each expert: ${Math.min(...all).toLocaleString("en")} to ${Math.max(...all).toLocaleString("en")}, ${Math.round(mean).toLocaleString("en")} in the mean. ` +
      (none ? `${none} of ${all.length} experts were chosen by none.` : "Every expert was chosen by some.");
    byId("tokens").style.height = `${Math.max(200, 110 + 24 * deep.length)}px`;
    draw("tokens", [{
      type: "heatmap", x: [...Array(width).keys()].map(String), y: deep.map(String), z, xgap: 1, ygap: 1, colorscale: [[0, colour("bad")], [0.25, colour("middle")], [1, colour("good")]], zmin: 0,
      hovertemplate: "layer %{y}, expert %{x}: %{z:,} tokens<extra></extra>", colorbar: { thickness: 12, outlinewidth: 0, title: { text: "tokens", side: "top" } },
    }], { xaxis: axis({ type: "category", title: { text: "expert", standoff: 8 }, showgrid: false, nticks: 32 }), yaxis: axis({ type: "category", title: { text: "layer", standoff: 8 }, autorange: "reversed", showgrid: false, nticks: 32 }) });
  }

  function drawTimes() {
    draw("times", Object.entries(data.seconds).map(([phase, value]) => ({
      type: "bar", orientation: "h", name: plain(phase), y: [""], x: [value], text: [plain(phase)], textposition: "inside", insidetextanchor: "middle", hovertemplate: `${plain(phase)}: %{x:.2f} s<extra></extra>`,
    })), { barmode: "stack", bargap: 0.3, margin: { l: 12, r: 12, t: 8, b: 52 }, xaxis: axis({ title: { text: "seconds", standoff: 8 } }), yaxis: axis({ showticklabels: false }) });
  }

  function drawCurve() {
    const x = data.curve.map((each) => each.at);
    draw("curve", [{
      type: "scatter", mode: "lines+markers", name: "KL", x, y: data.curve.map((each) => each.kl), error_y: { type: "data", array: data.curve.map((each) => each.error || 0), thickness: 1, width: 2 }, marker: { size: 5 },
      hovertemplate: "after %{x:.0f} tokens: KL %{y:.4g}<extra></extra>",
    }], { title: { text: "KL by position", font: { size: 14 }, x: 0.02, xanchor: "left" }, margin: { l: 60, r: 16, t: 40, b: 52 }, xaxis: axis({ title: { text: "tokens before", standoff: 8 } }), yaxis: axis({ rangemode: "tozero" }) });
  }

  function drawAll() {
    if (typeof Plotly === "undefined") return;
    if (known.length && byId("heat")) drawHeat();
    if (pictured.length) drawValues();
    if (byId("above")) drawAbove();
    if (experts.length) drawExperts();
    if (data.seconds && byId("times")) drawTimes();
    if (data.curve.length && byId("curve")) drawCurve();
  }

  // ---- the table ----

  const WORDS = ["weights", "activations", "observers"];
  const COLUMNS = [
    { key: "name", title: "layer" }, { key: "shape", title: "shape" },
    { key: "bits", title: "bits", show: fixed(2) }, { key: "output_db", title: "output dB", show: fixed(1) }, { key: "weight_db", title: "weight dB", show: fixed(1) }, { key: "gain_db", title: "gain dB", show: fixed(2) },
    { key: "above_optimum", title: "above best", show: METRICS.above_optimum.show }, { key: "num_tokens", title: "tokens", show: (value) => (isKnown(value) ? value.toLocaleString("en") : "–") },
    { key: "weights", title: "weights" }, { key: "activations", title: "inputs" }, { key: "observers", title: "observers" }, // long words last, so that figures are in sight
  ].filter(({ key, show }) => key === "name" || columns[key].some((value) => isKnown(value) && value !== "") && (show || new Set(columns[key]).size > 1));
  const common = WORDS.filter((key) => count && columns[key][0] && !COLUMNS.some((each) => each.key === key))
    .map((key) => `; ${{ weights: "weights", activations: "inputs", observers: "observers" }[key]} ${columns[key][0]}`).join("");
  const PAGE = 100;
  let [sortedBy, isDown, isWhole] = [null, false, false];
  const compareNames = new Intl.Collator("en", { numeric: true }).compare;

  function compare(a, b) {
    const [x, y] = [columns[sortedBy][a], columns[sortedBy][b]];
    if (!isKnown(x) || !isKnown(y)) return isKnown(x) ? -1 : isKnown(y) ? 1 : a - b; // what is not known comes last, always
    const order = typeof x === "number" ? x - y : compareNames(x, y);
    return (isDown ? -order : order) || a - b;
  }

  function fillTable() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (number) => COLUMNS.filter(({ show }) => !show).map(({ key }) => columns[key][number]).concat(columns.kind[number]).join(" ").toLowerCase();
    const found = numbers.filter((number) => { const all = text(number); return words.every((word) => all.includes(word)); });
    if (sortedBy) found.sort(compare);
    const shown = isWhole ? found : found.slice(0, PAGE);
    byId("count").textContent = `${found.length === count ? count : `${found.length} of ${count}`} layers${common}`;
    byId("more").hidden = shown.length === found.length;
    byId("more").textContent = `Show all ${found.length}`;
    byId("table").tBodies[0].replaceChildren(...shown.map((number) => {
      const row = document.createElement("tr");
      row.dataset.number = number;
      for (const { key, show } of COLUMNS) {
        const cell = row.insertCell();
        cell.textContent = show ? show(columns[key][number]) : columns[key][number];
        if (show) cell.className = "number";
        if (key === "name") cell.title = columns.name[number];
      }
      return row;
    }));
  }

  const head = byId("table").tHead.rows[0];
  for (const { key, title, show } of COLUMNS) {
    const cell = document.createElement("th");
    const button = document.createElement("button");
    cell.scope = "col";
    if (show) cell.className = "number";
    button.type = "button";
    button.textContent = title;
    button.addEventListener("click", () => {
      [sortedBy, isDown] = [key, sortedBy === key ? !isDown : false];
      for (const each of head.cells) each.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      fillTable();
    });
    cell.append(button);
    head.append(cell);
  }
  byId("filter").addEventListener("input", fillTable);
  byId("more").addEventListener("click", () => { isWhole = true; fillTable(); });
  byId("table").tBodies[0].addEventListener("click", (event) => { const row = event.target.closest("tr"); if (row) pick(Number(row.dataset.number), true); });
  fillTable();

  // ---- choices ----

  const option = (value, text) => { const each = document.createElement("option"); [each.value, each.textContent] = [value, text]; return each; };
  if (byId("metric")) {
    byId("metric").append(...known.map((key) => option(key, METRICS[key].title)));
    byId("metric").addEventListener("change", drawHeat);
    byId("of-experts").hidden = !columns.expert.some(isKnown);
  }
  if (pictured.length) {
    byId("values").hidden = false;
    const worst = document.querySelector("button.layer");
    const first = worst ? columns.name.indexOf(worst.dataset.layer) : -1;
    picked = data.pictures[first] ? first : pictured[0];
    byId("picked").append(...pictured.map((number) => option(String(number), columns.name[number])));
    byId("picked").value = String(picked);
    byId("picked").addEventListener("change", (event) => pick(Number(event.target.value), false));
    for (const id of ["whole", "log"]) byId(id).addEventListener("change", drawValues);
  }
  if (experts.length) byId("experts").hidden = false;
  for (const each of document.querySelectorAll("button.layer")) each.addEventListener("click", () => pick(columns.name.indexOf(each.dataset.layer), true));

  begin(drawAll);
})();
