// Draws the charts, makes the tables sortable, switches between light and dark. What they look like is decided elsewhere.
const config = JSON.parse(document.getElementById("chart-config").textContent);

async function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "yes";
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const drawing = figure.querySelector(".drawing");
  if (!drawing.clientWidth) {
    // In a closed <details>: as wide as it will be.
    spec.width = figure.closest("section").clientWidth - 40;
    spec.autosize = { type: "fit-x", contains: "padding" };
  }
  await window.vegaEmbed(drawing, spec, { config, actions: false, renderer: "svg", tooltip: { theme: "custom" } });
}

function rest(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

// What a column of numbers takes besides text: "<700", ">= 1.2", "80 %". A number alone means what is written like it,
// so that "700" finds 699.8, and "1.2" finds 1.16, but not 1.26. Of a range it holds for both ends.
const COMPARED = /^(<=|>=|<|>|=)?\s*([-\u2212]?[\d,]*\.?\d+)\s*%?$/;
const COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };

function numbersIn(text) {
  const parts = text.replace(/[,%]/g, "").replaceAll("\u2212", "-").split(" to ");
  return parts.map((part) => (part.trim() === "" ? NaN : Number(part)));
}

function asked(typed, isNumeric) {
  const wanted = typed.trim();
  const parts = isNumeric ? COMPARED.exec(wanted) : null;
  if (!parts) return wanted.toLowerCase() && ((text) => text.toLowerCase().includes(wanted.toLowerCase()));
  const [, sign, written] = parts;
  const [number] = numbersIn(written);
  if (sign && sign !== "=") return (text) => numbersIn(text).every((one) => COMPARE[sign](one, number));
  const half = 0.5 * 10 ** -(written.split(".")[1] ?? "").length;
  return (text) => numbersIn(text).every((one) => Math.abs(one - number) <= half * (1 + 1e-9));
}

// The row of the filters' boxes has no words.
function withoutFilters(csv) {
  return csv.replace(/\n(?:"",?)+(?=\n)/, "");
}

function filterOf(isNumeric) {
  return function () {
    const column = this.dt().column(this.idx());
    const input = document.createElement("input");
    input.type = "text";
    input.setAttribute("aria-label", `filter by ${column.title()}`);
    if (isNumeric(this.idx())) input.title = "text, or a comparison such as <700, >=1.2, 700";
    input.addEventListener("input", () => column.search.fixed("typed", asked(input.value, isNumeric(this.idx()))).draw());
    return input;
  };
}

async function enhanceTables() {
  const tables = document.querySelectorAll("table.data-table");
  if (!tables.length) return;
  const source = document.getElementById("tables-module").textContent;
  const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const { default: DataTable } = await import(address);
  for (const table of tables) {
    const columns = (name) => [...table.tHead.rows[0].cells].flatMap((cell, i) => (cell.classList.contains(name) ? [i] : []));
    DataTable.ColumnControl.content.filter = { defaults: {}, init: filterOf((i) => columns("number").includes(i)) };
    const made = new DataTable(table, {
      paging: false,
      order: [],
      autoWidth: false,
      layout: {
        topStart: "info",
        topEnd: [{ buttons: [{ extend: "csvHtml5", text: "CSV of these rows", customize: withoutFilters }] }, "search"],
        bottomStart: null,
      },
      columnDefs: [
        { targets: columns("number"), type: "num" },
        { targets: columns("high-first"), orderSequence: ["desc", "asc", ""] },
      ],
      columnControl: [
        { target: 0, content: [] },
        { target: 1, content: ["filter"] },
      ],
      ordering: { indicators: true },
      language: {
        search: "",
        searchPlaceholder: "find anywhere",
        entries: { _: "rows", 1: "row" },
        info: "_TOTAL_ _ENTRIES-TOTAL_",
        infoFiltered: "of _MAX_",
        infoEmpty: "no rows",
      },
    });
    made.table().container().querySelector(".dt-search input").setAttribute("aria-label", "find in all columns");
  }
}

function switchTheme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const say = () => (button.textContent = isDark() ? "light" : "dark");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  say();
}

function openForPrint() {
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
}

switchTheme();
openForPrint();
const figures = [...document.querySelectorAll("figure.chart")];
const hidden = figures.filter((figure) => figure.closest("details:not([open])"));
for (const figure of figures) if (!hidden.includes(figure)) await draw(figure);
await enhanceTables();
performance.mark("ready");
document.documentElement.dataset.ready = "yes";
for (const figure of hidden) {
  await rest(0);
  await draw(figure);
}
performance.mark("all-drawn");
document.documentElement.dataset.drawn = "all";
