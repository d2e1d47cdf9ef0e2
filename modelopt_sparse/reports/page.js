"use strict";
// What the page does once it is there: unpack, fill tables, draw plots. Texts are only ever set as text, never as HTML.

const ROW = 28; // pixels, as in page.css
const FEW = 10; // rows of a table that needs no filter
const MOST_PRINTED = 2000; // rows of a table
const COLORS = ["#3b82c4", "#e0802b", "#2f9e73", "#c4548d", "#8b6fd0", "#a89316", "#d1495b", "#3fa3bf", "#96704f", "#7f8891"];
const GLYPHS = { // by the names that plotly has for the symbols of lines
  circle: "\u25CF", square: "\u25A0", diamond: "\u25C6", x: "\u2716", "triangle-up": "\u25B2", cross: "\u271A",
  "triangle-down": "\u25BC", star: "\u2605", pentagon: "\u2B1F", hexagon: "\u2B22",
};

async function unpacked(key) {
  const packed = document.getElementById("packed-" + key).textContent;
  const bytes = Uint8Array.from(atob(packed), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function made(tag, parent, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  parent.append(element);
  return element;
}

// tables: only the rows in view are in the page -----------------------------------------------------------------------

function fillTable({ key, heads, columns }) {
  const place = document.getElementById("table-" + key);
  const count = columns[0].length;
  const numeric = columns.map((cells) => cells.every((cell) => cell === null || typeof cell === "number"));
  const shown = (column, row) => (columns[column][row] === null ? "" : String(columns[column][row]));
  const padded = (text) => text.toLowerCase().replace(/\d+/g, (digits) => digits.padStart(9, "0")); // layer 10 after 9
  let order = Array.from({ length: count }, (_, row) => row); // all rows, sorted
  let rows = order; // those that the filter lets through
  let sorted = { column: -1, falling: false };
  const sortKeys = []; // of each column, made when it is first sorted by
  let texts = null; // of each row, made when it is first filtered
  let chosen = -1;

  const tools = made("div", place, undefined, "tools");
  tools.hidden = count < FEW;
  const filter = made("input", tools);
  filter.type = "search";
  filter.placeholder = "filter: all words must occur in a row";
  filter.setAttribute("aria-label", "filter rows");
  const counter = made("span", tools, undefined, "count");
  const scroll = made("div", place, undefined, "scroll");
  scroll.tabIndex = 0;
  const table = made("table", scroll);
  const widths = heads.map((head, column) => {
    let longest = head.length + 2;
    for (let row = 0; row < count; row++) longest = Math.max(longest, Math.min(shown(column, row).length, 46));
    return longest * 8.2 + 26;
  });
  table.style.width = widths.reduce((a, b) => a + b) + "px";
  const group = made("colgroup", table);
  for (const width of widths) made("col", group).style.width = width + "px";
  const headRow = made("tr", made("thead", table));
  const headCells = heads.map((head, column) => {
    const cell = made("th", headRow, undefined, numeric[column] ? "number" : "");
    cell.scope = "col";
    made("button", cell, head).addEventListener("click", () => sortBy(column));
    return cell;
  });
  const body = made("tbody", table);
  const detail = made("dl", place, undefined, "detail");

  function space(height) {
    const row = made("tr", body, undefined, "space");
    const cell = made("td", row);
    cell.colSpan = heads.length;
    cell.style.height = height + "px";
  }

  function render(all) {
    const first = all ? 0 : Math.max(0, Math.floor(scroll.scrollTop / ROW) - 10);
    const end = all ? Math.min(rows.length, MOST_PRINTED) : Math.min(rows.length, first + Math.ceil(scroll.clientHeight / ROW) + 20);
    body.replaceChildren();
    if (first > 0) space(first * ROW);
    for (let i = first; i < end; i++) {
      const line = made("tr", body, undefined, rows[i] === chosen ? "chosen" : "");
      line.addEventListener("click", () => choose(rows[i]));
      heads.forEach((_, column) => {
        made("td", line, shown(column, rows[i]), numeric[column] ? "number" : "");
      });
    }
    if (end < rows.length && !all) space((rows.length - end) * ROW);
    if (all && end < rows.length) made("td", made("tr", body), `and ${rows.length - end} more rows`).colSpan = heads.length;
    counter.textContent = rows.length === count ? `${count.toLocaleString("en")} row${count === 1 ? "" : "s"}` : `${rows.length.toLocaleString("en")} of ${count.toLocaleString("en")} rows`;
  }

  function choose(row) { // all cells of a row in full, below the table
    chosen = row;
    detail.replaceChildren();
    heads.forEach((head, column) => {
      if (shown(column, row)) {
        made("dt", detail, head);
        made("dd", detail, shown(column, row));
      }
    });
    render(false);
  }

  function sortBy(column) { // rising, falling, and as it was
    if (sorted.column !== column) sorted = { column, falling: false };
    else sorted = sorted.falling ? { column: -1, falling: false } : { column, falling: true };
    order = Array.from({ length: count }, (_, row) => row);
    if (sorted.column >= 0) {
      sortKeys[column] ??= numeric[column] ? columns[column] : columns[column].map((_, row) => padded(shown(column, row)));
      const values = sortKeys[column];
      const sign = sorted.falling ? -1 : 1;
      const empty = (row) => columns[column][row] === null;
      order.sort((a, b) => empty(a) - empty(b) || (values[a] < values[b] ? -sign : values[a] > values[b] ? sign : a - b));
    }
    headCells.forEach((cell, i) => {
      if (i === sorted.column) cell.setAttribute("aria-sort", sorted.falling ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    look();
  }

  function look() { // the sorted rows that the filter lets through, from the top
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) texts ??= columns[0].map((_, row) => heads.map((_, column) => shown(column, row)).join("\n").toLowerCase());
    rows = words.length ? order.filter((row) => words.every((word) => texts[row].includes(word))) : order;
    scroll.scrollTop = 0;
    render(false);
  }

  filter.addEventListener("input", look);
  scroll.addEventListener("scroll", () => requestAnimationFrame(() => render(false)));
  addEventListener("resize", () => render(false));
  addEventListener("beforeprint", () => render(true));
  addEventListener("afterprint", () => render(false));
  render(false);
}

// plots ---------------------------------------------------------------------------------------------------------------

function themed(layout) { // in the colors that the page has now
  const style = getComputedStyle(document.documentElement);
  const [ink, line, card] = ["--ink", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true };
  const result = {
    paper_bgcolor: card, plot_bgcolor: card, showlegend: false, font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    margin: { l: 56, r: 12, t: 8, b: 44 }, hovermode: "closest",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
  };
  for (const name of ["xaxis", "yaxis"]) result[name] = { ...axis };
  for (const [name, value] of Object.entries(layout)) result[name] = /axis/.test(name) ? { ...axis, ...value } : value;
  return result;
}

function draw({ key, traces, layout, choices }) {
  const plot = document.querySelector("#figure-" + key + " .plot");
  const sets = Object.entries(choices);
  if (!sets.length) sets.push(["", traces.map((_, i) => i)]);
  for (const [, set] of sets) set.forEach((i, place) => paint(traces[i], place));
  const legend = document.createElement("div");
  legend.className = "legend";
  const show = (set) => {
    traces.forEach((trace, i) => { trace.visible = set.includes(i); });
    legend.replaceChildren();
    for (const i of set) if (traces[i].color && traces[i].name) legendEntry(legend, plot, traces[i], i);
  };
  show(sets[0][1]);
  if (sets.length > 1) {
    const select = document.createElement("select");
    select.setAttribute("aria-label", "what is drawn");
    for (const [label] of sets) made("option", select, label);
    select.addEventListener("change", () => {
      show(choices[select.value]);
      Plotly.restyle(plot, { visible: traces.map((trace) => trace.visible) });
    });
    plot.before(select);
  }
  plot.before(legend);
  Plotly.newPlot(plot, traces, themed(layout), { responsive: true, displayModeBar: false });
  const again = () => { Plotly.relayout(plot, themed(layout)); Plotly.Plots.resize(plot); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  matchMedia("print").addEventListener("change", again);
}

function paint(trace, place) { // lines and bars have a color by their order, and lines a symbol; heatmaps have a scale
  if (trace.type === "heatmap") return;
  trace.color = trace.line?.color ?? COLORS[place % COLORS.length];
  trace.marker = { color: trace.color };
  if (trace.type !== "scatter") return;
  if (trace.mode.includes("markers")) Object.assign(trace.marker, { symbol: Object.keys(GLYPHS)[(place + Math.floor(place / COLORS.length)) % COLORS.length], size: 7 });
  trace.line = { ...trace.line, color: trace.color };
}

function legendEntry(legend, plot, trace, index) { // a press hides the line, another shows it
  const entry = made("button", legend);
  made("span", entry, GLYPHS[trace.marker.symbol] ?? "\u25A0").style.color = trace.color;
  made("span", entry, new DOMParser().parseFromString(trace.name, "text/html").body.textContent); // escaped for plotly
  entry.setAttribute("aria-pressed", "true");
  entry.addEventListener("click", () => {
    const on = entry.getAttribute("aria-pressed") === "false";
    entry.setAttribute("aria-pressed", String(on));
    Plotly.restyle(plot, { visible: on }, [index]);
  });
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));

// the page ------------------------------------------------------------------------------------------------------------

async function main() {
  const data = JSON.parse(await unpacked("data"));
  for (const table of data.tables) if (table.heads.length) fillTable(table);
  document.documentElement.dataset.tables = Math.round(performance.now()); // ms since the page was asked for
  if (data.figures.length) made("script", document.head, await unpacked("plotly"));
  for (const figure of data.figures) {
    await new Promise((resolve) => setTimeout(resolve)); // lets the page answer in between
    draw(figure);
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
}

main().catch((error) => {
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = "Plots and tables could not be shown (" + error + "). A browser of 2023 or later is needed.";
  throw error;
});
