// Draws the charts, makes the tables sortable, switches between light and dark. What they look like is decided elsewhere.
const config = JSON.parse(document.getElementById("chart-config").textContent);
// In pixels: with less, names and numbers beside the bars would leave no room for these.
const NARROW = 560;

async function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "yes";
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const drawing = figure.querySelector(".drawing");
  // In a closed <details> it is as wide as it will be.
  const width = drawing.clientWidth || figure.closest("section").clientWidth - 40;
  const narrow = figure.querySelector("script.narrow");
  if (narrow && width < NARROW) Object.assign(spec, JSON.parse(narrow.textContent));
  if (!drawing.clientWidth) {
    spec.width = width;
    spec.autosize = { type: "fit-x", contains: "padding" };
  }
  await window.vegaEmbed(drawing, spec, { config, actions: false, ast: true, renderer: "svg", tooltip: { theme: "custom" } });
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

// Tables have the columns for which there is room, and a button for all. Those that are hidden stay in the CSV.
const NARROWEST = 600;
const hiding = new CSSStyleSheet();
document.adoptedStyleSheets = [...document.adoptedStyleSheets, hiding];

function hideColumn(table, place) {
  hiding.insertRule(`#${CSS.escape(table.id)}.fitted tr > :nth-child(${place + 1}) { display: none; }`, 0);
}

function showAll(table) {
  const own = `#${CSS.escape(table.id)}.fitted `;
  for (let i = hiding.cssRules.length - 1; i >= 0; i--) {
    if (hiding.cssRules[i].selectorText.startsWith(own)) hiding.deleteRule(i);
  }
}

function fit(table) {
  const box = table.closest(".dt-layout-table, .card, .with-texts");
  if (!box?.clientWidth || table.dataset.all) return;
  showAll(table);
  table.classList.add("fitted");
  const style = getComputedStyle(box);
  const inside = box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  // Narrower, those with filters scroll by themselves.
  const room = table.matches(".data-table") ? Math.max(inside, NARROWEST) : inside;
  const heads = [...table.tHead.rows[0].cells];
  const widths = heads.map((head) => head.offsetWidth);
  const turns = heads.map((_, i) => i).filter((i) => Number(heads[i].dataset.turn));
  turns.sort((a, b) => heads[a].dataset.turn - heads[b].dataset.turn);
  let over = table.offsetWidth - room;
  const hidden = turns.length;
  while (turns.length && over > 0) {
    const place = turns.shift();
    hideColumn(table, place);
    over -= widths[place];
    if (over <= 0) over = table.offsetWidth - room;
  }
  if (turns.length < hidden) offerAll(table, heads.length);
}

function offerAll(table, count) {
  if (table.dataset.offered) return;
  table.dataset.offered = "yes";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "all-columns screen-only";
  const say = () => {
    button.setAttribute("aria-pressed", String(Boolean(table.dataset.all)));
    button.textContent = table.dataset.all ? "fewer columns" : `all ${count} columns`;
  };
  button.addEventListener("click", () => {
    if (table.dataset.all) delete table.dataset.all;
    else table.dataset.all = "yes";
    table.classList.toggle("fitted", !table.dataset.all);
    fit(table);
    say();
  });
  say();
  const buttons = table.closest(".dt-container")?.querySelector(".dt-buttons");
  if (buttons) buttons.prepend(button);
  else table.after(button);
}

function fitTables() {
  const fitAll = (root) => root.querySelectorAll("table.data-table, table.fitted-table").forEach(fit);
  fitAll(document);
  document.addEventListener("toggle", (event) => event.target.open && fitAll(event.target), true);
  let timer;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => fitAll(document), 150);
  });
}

// What explains a heading or a word is shown beside it, by mouse and by keyboard.
function showTips() {
  const tip = document.getElementById("tip");
  for (const head of document.querySelectorAll("th[aria-describedby]")) {
    const id = head.getAttribute("aria-describedby");
    const focused = head.querySelector("[tabindex]");
    if (focused) focused.setAttribute("aria-describedby", id);
    else if (!head.hasAttribute("tabindex")) head.tabIndex = 0;
  }
  const show = (event) => {
    const at = event.target.closest?.("[aria-describedby^='term-']");
    tip.hidden = !at;
    if (!at) return;
    tip.textContent = document.getElementById(at.getAttribute("aria-describedby")).textContent;
    const place = at.getBoundingClientRect();
    const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = place.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 4 ? above : place.bottom + 6}px`;
  };
  const hide = () => (tip.hidden = true);
  document.addEventListener("mouseover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

async function copy(button) {
  const lines = button.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(lines.textContent);
    button.textContent = "Copied";
  } catch {
    // Where the page may not write to the clipboard, the reader does.
    window.getSelection().selectAllChildren(lines);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
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
for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
const figures = [...document.querySelectorAll("figure.chart")];
const hidden = figures.filter((figure) => figure.closest("details:not([open])"));
for (const figure of figures) if (!hidden.includes(figure)) await draw(figure);
await enhanceTables();
fitTables();
showTips();
performance.mark("ready");
document.documentElement.dataset.ready = "yes";
for (const figure of hidden) {
  await rest(0);
  await draw(figure);
}
performance.mark("all-drawn");
document.documentElement.dataset.drawn = "all";
