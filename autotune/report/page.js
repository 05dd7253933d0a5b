"use strict";
(() => {
  const { figures, trials, unit, speed_unit: speedUnit } = JSON.parse(document.getElementById("data").textContent);
  const count = trials.number.length;

  // A column's value of a trial; texts that repeat are kept once, a configuration as numbers of words.
  const value = (column, row) => {
    const values = trials[column];
    if (column === "config") return values[row].map((word) => trials.words[word]).join(", ");
    return values.texts ? values.texts[values.of[row]] : values[row];
  };

  // Charts. Drawn when they come near the screen, and again when the page turns dark or light.
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const colored = (node) => {
    if (Array.isArray(node)) return node.map(colored);
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(
      Object.entries(node).map(([key, each]) =>
        key.endsWith("color") && typeof each === "string" && each.startsWith("--")
          ? [key, color(each)]
          : [key, colored(each)],
      ),
    );
  };

  const wrapped = (text) => escaped(text).replace(/(.{30,60}?), /g, "$1,<br>");

  const pointed = (trace) =>
    trace.rows
      ? {
          ...trace,
          rows: undefined,
          x: trace.rows.map((row) => trials[trace.x][row]),
          y: trace.rows.map((row) => trials[trace.y][row]),
          text: trace.rows.map((row) => wrapped(`#${trials.number[row]} ${value("config", row)}`)),
        }
      : trace;

  const draw = (place) => {
    const figure = figures[place.dataset.figure];
    const axis = {
      gridcolor: color("--grid"),
      linecolor: color("--grid"),
      zeroline: false,
      automargin: true,
    };
    const given = colored(figure.layout);
    const layout = {
      ...given,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("--muted") },
      hoverlabel: {
        bgcolor: color("--surface"),
        bordercolor: color("--grid"),
        font: { color: color("--text") },
        align: "left",
      },
      margin: { l: 52, r: 14, t: 22, b: 40 },
      xaxis: { ...axis, ...given.xaxis, title: { ...given.xaxis.title, font: { size: 12.5 } } },
      yaxis: { ...axis, ...given.yaxis, title: { ...given.yaxis.title, font: { size: 12.5 } } },
    };
    const settings = { displayModeBar: false, responsive: true, scrollZoom: false };
    return Plotly.react(place, figure.data.map((trace) => colored(pointed(trace))), layout, settings).then(() => {
      place.dataset.drawn = "true";
    });
  };

  const places = [...document.querySelectorAll("[data-figure]")];
  const near = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) {
          near.unobserve(target);
          draw(target);
        }
      }
    },
    { rootMargin: "300px" },
  );
  // plotly.js stands behind this script, so that the page answers before it is read.
  addEventListener("DOMContentLoaded", () => places.forEach((place) => near.observe(place)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    places.filter((place) => place.dataset.drawn).forEach(draw),
  );
  addEventListener("beforeprint", () => places.filter((place) => !place.dataset.drawn).forEach(draw));

  // The table. Only the rows in view exist; those above and below are two empty ones of their height.
  const ROW_HEIGHT = 32;
  const box = document.querySelector(".trials");
  const body = box.querySelector("tbody");
  const headers = [...box.querySelectorAll("th")];
  const columns = headers.map((header) => header.querySelector("button").dataset.sort);
  const isNumber = Object.fromEntries(columns.map((name, i) => [name, headers[i].classList.contains("number")]));
  const searched = trials.number.map((_, row) => `${value("config", row)} ${value("reason", row)}`.toLowerCase());
  let order = trials.number.map((_, row) => row);
  let sorted = { column: trials.speed.some((speed) => speed !== null) ? "speed" : "number", descending: true };
  let selected = -1;

  const shown = (column, row) => {
    const each = value(column, row);
    if (each === null) return "";
    if (column === "memory") return each.toFixed(2);
    if (isNumber[column] && column !== "number") {
      return each.toLocaleString("en-US", { maximumFractionDigits: 0 });
    }
    return String(each);
  };

  const space = (rows) => {
    const row = document.createElement("tr");
    row.className = "space";
    row.ariaHidden = "true";
    const cell = row.insertCell();
    cell.colSpan = columns.length;
    cell.style.height = `${rows * ROW_HEIGHT}px`;
    return row;
  };

  const tableRow = (row) => {
    const made = document.createElement("tr");
    made.dataset.row = row;
    if (trials.answer[row]) made.classList.add("answer");
    if (row === selected) made.classList.add("selected");
    columns.forEach((column) => {
      const cell = made.insertCell();
      cell.textContent = shown(column, row);
      if (isNumber[column]) cell.className = "number";
      if (column === "evidence") cell.className = value(column, row);
    });
    return made;
  };

  let drawnFrom = -1;
  const render = (force) => {
    const visible = Math.ceil(box.clientHeight / ROW_HEIGHT);
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - visible);
    const from = Math.min(first - (first % 10), Math.max(0, order.length - visible));
    if (from === drawnFrom && !force) return;
    drawnFrom = from;
    const to = Math.min(order.length, from + 3 * visible + 10);
    body.replaceChildren(space(from), ...order.slice(from, to).map(tableRow), space(order.length - to));
  };

  const compare = (column) => (a, b) => {
    const [left, right] = [value(column, a), value(column, b)];
    if (left === right) return trials.number[a] - trials.number[b];
    // What has no figure comes last, whichever way.
    if (left === null || left === "") return 1;
    if (right === null || right === "") return -1;
    const ascending = left < right ? -1 : 1;
    return sorted.descending ? -ascending : ascending;
  };

  const text = document.getElementById("filter-text");
  const onlyFrontier = document.getElementById("filter-frontier");
  const selects = [...document.querySelectorAll("[data-filter]")];
  const update = () => {
    const wanted = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = selects.filter((select) => select.value).map((select) => [select.dataset.filter, select.value]);
    order = [];
    for (let row = 0; row < count; row++) {
      if (
        chosen.every(([column, wantedValue]) => value(column, row) === wantedValue) &&
        (!onlyFrontier.checked || trials.frontier[row]) &&
        wanted.every((word) => searched[row].includes(word))
      ) {
        order.push(row);
      }
    }
    order.sort(compare(sorted.column));
    headers.forEach((header, i) => {
      if (columns[i] === sorted.column) header.ariaSort = sorted.descending ? "descending" : "ascending";
      else header.removeAttribute("aria-sort");
    });
    const total = `${count.toLocaleString("en-US")} trial${count === 1 ? "" : "s"}`;
    document.getElementById("shown").textContent =
      order.length === count ? total : `${order.length.toLocaleString("en-US")} of ${total}`;
    box.scrollTop = 0;
    render(true);
  };
  const headHeight = box.querySelector("thead").offsetHeight;
  if (headHeight + count * ROW_HEIGHT < box.clientHeight) {
    box.style.height = `${headHeight + count * ROW_HEIGHT + box.offsetHeight - box.clientHeight}px`;
  }

  box.querySelector("thead").addEventListener("click", (event) => {
    const column = event.target.closest("button")?.dataset.sort;
    if (!column) return;
    const descending = column === sorted.column ? !sorted.descending : isNumber[column] && column !== "number";
    sorted = { column, descending };
    update();
  });
  body.addEventListener("click", (event) => {
    const made = event.target.closest("tr[data-row]");
    if (!made) return;
    selected = Number(made.dataset.row);
    const figures = [
      value("outcome", selected),
      value("speed", selected) === null ? "" : `${shown("speed", selected)} ${speedUnit}`,
      value("memory", selected) === null ? "" : `${shown("memory", selected)} ${unit}`,
      value("evidence", selected),
      value("reason", selected),
    ].filter(Boolean);
    document.getElementById("detail").textContent =
      `Trial ${trials.number[selected]}: ${value("config", selected)}. ${figures.join(", ")}.`;
    render(true);
  });
  let pending = false;
  box.addEventListener("scroll", () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      render(false);
    });
  });
  addEventListener("resize", () => render(true));
  addEventListener("beforeprint", () => render(true));
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  [text, onlyFrontier, ...selects].forEach((input) => input.addEventListener("input", update));
  update();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
