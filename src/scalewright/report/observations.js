"use strict";
(() => {
  const { worst, layers, pictures, experts } = JSON.parse(document.getElementById("data").textContent);
  const short = (value) => (!isKnown(value) ? "–" : value && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) ? value.toExponential(2) : Number(value.toPrecision(4)).toLocaleString("en")).replace("-", "−");
  const decibels = (value) => (isKnown(value) ? `${value.toFixed(1)} dB` : "–");
  const make = (kind, text, parent) => { const made = document.createElement(kind); made.textContent = text; parent.append(made); return made; };

  const METRICS = {
    ratio: { title: "input: largest channel, in median channels", show: short, isLog: true },
    kurtosis: { title: "input: kurtosis (3 is normal)", show: short, isLog: true },
    static_db: { title: "input: kept by the best single scale, dB", show: decibels, isGood: true },
    dynamic_db: { title: "input: kept with scales for each token, dB", show: decibels, isGood: true },
    lost: { title: "input: lost by one scale for all tokens, dB", show: decibels },
    dead: { title: "input: dead channels", show: short },
    weight_ratio: { title: "weight: largest column, in median columns", show: short, isLog: true },
    weight_kurtosis: { title: "weight: kurtosis (3 is normal)", show: short, isLog: true },
    weight_db: { title: "weight: kept by the best observer, dB", show: decibels, isGood: true },
    tokens: { title: "tokens", show: short, isGood: true },
  };
  const known = Object.keys(METRICS).filter((key) => layers.some((each) => isKnown(each[key])));

  const draw = (id, traces, given) => drawIn(id, traces, { margin: { l: 60, r: 16, t: 16, b: 60 }, ...given });
  const heatScale = (isGood) => {
    const scale = [[0, colour("good")], [0.5, colour("middle")], [1, colour("bad")]];
    return isGood ? scale.map(([stop, each]) => [1 - stop, each]).reverse() : scale;
  };

  // model.layers.3.mlp.experts.7.up_proj: depth 3, kind mlp.experts.up_proj
  const places = layers.map(({ name }) => {
    const words = name.split(".");
    const at = words.findIndex((word, number) => number > 0 && /^\d+$/.test(word));
    if (at < 0) return { depth: "–", kind: name };
    return { depth: words[at], kind: words.slice(at + 1).filter((word) => !/^\d+$/.test(word)).join(".") || words.slice(0, at).join(".") };
  });
  const kinds = [...new Set(places.map((each) => each.kind))];
  const depths = [...new Set(places.map((each) => each.depth))].sort((a, b) => (a === "–" ? -1 : b === "–" ? 1 : a - b));

  function drawHeat() {
    const key = byId("metric").value;
    const metric = METRICS[key];
    const grid = () => kinds.map(() => depths.map(() => null));
    const [z, who] = [grid(), grid()];
    layers.forEach((layer, number) => {
      if (!isKnown(layer[key])) return;
      const [row, column] = [kinds.indexOf(places[number].kind), depths.indexOf(places[number].depth)];
      const value = metric.isLog ? Math.log10(Math.max(layer[key], 1e-3)) : layer[key];
      const before = z[row][column];
      if (before === null || (metric.isGood ? value < before : value > before)) [z[row][column], who[row][column]] = [value, number];
    });
    const texts = who.map((line) => line.map((number) => (number === null ? "" :
      `<b>${plain(layers[number].name)}</b><br>${known.map((each) => `${METRICS[each].title}: ${METRICS[each].show(layers[number][each])}`).join("<br>")}`)));
    const all = z.flat().filter(isKnown);
    const [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
    const stops = [0, 0.25, 0.5, 0.75, 1].map((stop) => low + stop * (high - low));
    byId("heat").style.height = `${Math.max(220, 110 + 32 * kinds.length)}px`;
    draw("heat", [{
      type: "heatmap", x: depths, y: kinds.map(plain), z, customdata: who, text: texts, hovertemplate: "%{text}<extra></extra>", hoverongaps: false,
      zmin: low, zmax: high > low ? high : low + 1, colorscale: heatScale(metric.isGood), xgap: depths.length > 60 ? 0 : 2, ygap: 2,
      colorbar: { thickness: 12, outlinewidth: 0, len: 1, ...(metric.isLog ? { tickvals: stops, ticktext: stops.map((each) => short(10 ** each)) } : {}) },
    }], {
      xaxis: axis({ type: "category", title: { text: "depth" }, showgrid: false, nticks: 30 }),
      yaxis: axis({ type: "category", autorange: "reversed", showgrid: false }),
    });
    if (!byId("heat").dataset.clickable) {
      byId("heat").dataset.clickable = "yes";
      byId("heat").on("plotly_click", ({ points }) => { if (isKnown(points[0].customdata)) pick(points[0].customdata); });
    }
  }

  // ---- one layer ----

  let picked = worst;

  function drawLayer() {
    const layer = layers[picked];
    const facts = [layer.shape.join(" × "), `${short(layer.tokens)} tokens`];
    if (isKnown(layer.min)) {
      facts.push(`from ${short(layer.min)} to ${short(layer.max)}`, `kurtosis ${short(layer.kurtosis)}`, `largest channel ${short(layer.ratio)} times the median`);
      if (layer.num_outliers) facts.push(`${layer.num_outliers} outlier${layer.num_outliers > 1 ? "s" : ""}: ${layer.outliers.map(([channel, ratio]) => `${channel} (${short(ratio)})`).join(", ")}${layer.num_outliers > layer.outliers.length ? ", …" : ""}`);
      if (layer.dead) facts.push(`${layer.dead} dead channels`);
    }
    byId("figures").textContent = facts.join(" · ");
    fill("choices", ["input: observer", "from", "to", "all values", "mean token"], (layer.choices || []).map(([name, low, high, ...kept]) => [name, short(low), short(high), ...kept.map(decibels)]),
      isKnown(layer.dynamic_db) ? ["scales for each token", "", "", ...layer.dynamic.map(decibels)] : null);
    fill("weights", ["weight: observer", "range, of min-max's", "kept"], layer.weights.map(([name, db, share]) => [name, short(share), decibels(db)]));
    const picture = pictures[picked];
    if (!picture) { Plotly.purge("histogram"); byId("histogram").textContent = ""; return; }
    const width = (picture.to - picture.from) / picture.counts.length;
    const most = Math.max(...picture.counts);
    const bars = {
      type: "bar", name: "values seen", x: picture.counts.map((_, number) => picture.from + (number + 0.5) * width), y: picture.counts,
      width, marker: { color: colour("bar"), line: { width: 0 } }, hovertemplate: "%{y:,} values about %{x:.4g}<extra></extra>",
    };
    const lines = (layer.choices || []).map(([name, low, high, db, tokenDb]) => ({
      type: "scatter", mode: "lines", name: `${plain(name)}${isKnown(db) ? `, ${decibels(Math.min(db, tokenDb))}` : ""}`, x: [low, low, null, high, high], y: [0.8, most, null, 0.8, most],
      line: { width: 2 }, hovertemplate: `${plain(name)}: %{x:.4g}<extra></extra>`,
    }));
    draw("histogram", [bars, ...lines], {
      xaxis: axis({ title: { text: "value" } }), yaxis: axis({ type: "log", title: { text: "how often" }, dtick: 1 }), bargap: 0,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 60, r: 16, t: 48, b: 60 },
    });
  }

  function fill(id, heads, rows, last = null) {
    const place = byId(id);
    place.replaceChildren();
    if (!rows.length && !last) return;
    const head = place.createTHead().insertRow();
    for (const each of heads) make("th", each, head);
    for (const row of last ? [...rows, last] : rows) {
      const line = place.insertRow();
      for (const each of row) make("td", each, line);
    }
  }

  function pick(number, isSeen = false) {
    picked = number;
    byId("picked").value = String(number);
    drawLayer();
    if (!isSeen) byId("values").scrollIntoView({ behavior: "smooth" });
  }

  layers.forEach((each, number) => { make("option", each.name, byId("picked")).value = String(number); });
  byId("picked").value = String(picked);
  byId("picked").addEventListener("change", (event) => pick(Number(event.target.value), true));
  for (const key of known) make("option", METRICS[key].title, byId("metric")).value = key;
  byId("metric").addEventListener("change", drawHeat);

  // ---- experts ----

  function drawExperts() {
    byId("experts").hidden = !experts.length;
    if (!experts.length) return;
    const most = Math.max(...experts.map((each) => each.tokens.length));
    byId("tokens").style.height = `${Math.max(220, 110 + 28 * experts.length)}px`;
    draw("tokens", [{
      type: "heatmap", x: [...Array(most).keys()].map(String), y: experts.map((each) => plain(each.name)), z: experts.map((each) => each.tokens), zmin: 0,
      colorscale: heatScale(true), xgap: most > 60 ? 0 : 2, ygap: 2, hovertemplate: "<b>%{y}</b><br>expert %{x}: %{z:,} tokens<extra></extra>", colorbar: { thickness: 12, outlinewidth: 0, len: 1 },
    }], { xaxis: axis({ type: "category", title: { text: "expert" }, showgrid: false, nticks: 30 }), yaxis: axis({ type: "category", autorange: "reversed", showgrid: false }) });
  }

  // ---- the table ----

  const COLUMNS = [["name", "layer"], ["tokens", "tokens"], ["max", "absmax"], ["ratio", "× median"], ["num_outliers", "outliers"], ["dead", "dead"], ["kurtosis", "kurtosis"],
    ["static_db", "one scale"], ["dynamic_db", "each token"], ["weight_ratio", "weight ×"], ["weight_kurtosis", "weight kurt."], ["weight_db", "weight"]];
  const shown = COLUMNS.filter(([key]) => layers.some((each) => isKnown(each[key])));
  const valueOf = (layer, key) => (key === "max" && isKnown(layer.max) ? Math.max(-layer.min, layer.max) : layer[key]);
  let order = { key: null, isUp: true };

  for (const [key, title] of shown) {
    const head = document.createElement("th");
    const button = make("button", title, head);
    button.type = "button";
    button.addEventListener("click", () => { order = { key, isUp: order.key === key ? !order.isUp : key.endsWith("_db") || key === "name" }; fillTable(); });
    head.dataset.key = key;
    document.querySelector("#table thead tr").append(head);
  }

  function fillTable() {
    const wanted = byId("filter").value.toLowerCase();
    const numbers = layers.map((_, number) => number).filter((number) => layers[number].name.toLowerCase().includes(wanted));
    if (order.key) {
      const sign = order.isUp ? 1 : -1;
      numbers.sort((a, b) => {
        const [one, other] = [valueOf(layers[a], order.key), valueOf(layers[b], order.key)];
        if (!isKnown(one) || !isKnown(other)) return isKnown(one) ? -1 : isKnown(other) ? 1 : 0;
        return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
      });
    }
    for (const head of document.querySelectorAll("#table th")) {
      if (head.dataset.key === order.key) head.setAttribute("aria-sort", order.isUp ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const body = document.querySelector("#table tbody");
    body.replaceChildren();
    for (const number of numbers) {
      const line = body.insertRow();
      line.addEventListener("click", () => pick(number));
      for (const [key] of shown) {
        const value = valueOf(layers[number], key);
        const cell = make("td", key === "name" ? value : key.endsWith("_db") ? decibels(value) : short(value), line);
        if (key !== "name") cell.className = "number";
      }
    }
  }
  byId("filter").addEventListener("input", fillTable);
  fillTable();

  function drawAll() {
    drawHeat();
    drawLayer();
    drawExperts();
  }

  begin(drawAll);
})();
