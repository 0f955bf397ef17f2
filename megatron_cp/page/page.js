// The sections in their order. Each builds its elements and returns a function that draws and says how much it drew.
// A section that fails says so in its place, and the others are drawn.

const several = (values) => new Set(values).size > 1;
const candidates = report.candidates ?? [];
const SECTIONS = [
  ["result", "Result", "", buildResult, Boolean(report.verdict || report.command || report.environment?.length)],
  ["curves", "Curves", "", buildCurves, Boolean(report.curves?.length)],
  ["choice", "What to run, and why", "", buildChoice, candidates.length > 0 || Boolean(report.summary || report.facts?.length)],
  ["sizes", "Over context-parallel sizes", "The fastest candidate of each kind at each size.", buildOverCp,
    several(candidates.filter((each) => stepOf(each) !== undefined && each.cp !== undefined).map((each) => each.cp))],
  ["memory", "Memory of a rank", "By part, against the limit of the device.", buildMemory, candidates.some((each) => each.bytes)],
  ["ownership", "Who holds what", "", buildStream, Boolean(report.ownership)],
  ["layers", "Who holds what, by kind of layer", "The pack with the most documents so far.", buildLayers, Boolean(report.layers?.length)],
  ["tables", "Tables", "", buildTables, Boolean(report.tables?.length)],
  ["tiles", "Who computes which tile of the mask", "", buildTiles, Boolean(report.tiles?.length)],
  ["work", "Work by rank", "A step is as long as its busiest rank works.", buildWork, Boolean(report.work && numbers(report.work.values).length)],
  ["timeline", "Timeline of the streams", "", buildTimeline, Boolean(report.timeline)],
  ["traffic", "Traffic between ranks", "", buildTraffic, Boolean(report.traffic && report.traffic.size)],
  ["ranks", "Ranks in numbers", "", buildRanks,
    report.ranks > 0 && Boolean(report.ownership || report.work || report.timeline || report.traffic || report.hosts)],
  ["notes", "Notes", "", buildNotes, Boolean(report.notes?.length)],
];

function buildNotes(parent) {
  parent.append(element("ul", {}, ...report.notes.map((note) => element("li", {}, note))));
  return () => report.notes.length;
}

// The numbers behind the pictures. Filled when it is opened: at 1,024 ranks it is long.
function buildRanks(parent) {
  const details = element("details", {}, element("summary", {}, `Table of ${plural(report.ranks, "rank")}: tokens, work, busy time, bytes`));
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(rankTable()); });
  parent.append(details);
  return () => report.ranks;
}

function rankTable() {
  const columns = [{name: "rank", of: (rank) => rank, show: count, head: true, text: true}];
  if (report.hosts) columns.push({name: "host", of: hostOf, text: true});
  if (report.ownership) {
    const [starts, ends, ranks] = ["starts", "ends", "ranks"].map((name) => numbers(report.ownership[name]));
    const [tokens, fragments] = [new Float64Array(report.ranks), new Float64Array(report.ranks)];
    ranks.forEach((rank, at) => { tokens[rank] += ends[at] - starts[at]; fragments[rank]++; });
    columns.push({name: "tokens", of: (rank) => tokens[rank], show: count}, {name: "fragments", of: (rank) => fragments[rank], show: count});
  }
  if (report.work) {
    const work = numbers(report.work.values);
    columns.push({name: report.work.unit ? `work, ${report.work.unit}` : "work", of: (rank) => work[rank], show: decimal});
  }
  if (report.timeline) {
    const lanes = readTimeline();
    report.timeline.streams.forEach((stream, place) => columns.push({name: `${stream} busy, ms`, of: (rank) => lanes.busy[rank * lanes.streams + place] * 1e3, show: decimal}));
  }
  if (report.traffic) {
    const {sent, received} = totalsOf(readMatrix(), report.traffic.size);
    const show = (value) => amount(value, report.traffic.unit);
    columns.push({name: "sends", of: (rank) => sent[rank], show}, {name: "receives", of: (rank) => received[rank], show});
  }
  return sortable("Ranks; a click on a heading sorts", columns, [...Array(report.ranks).keys()]);
}

// -- colours of the page ----------------------------------------------------------------------------------------------

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
let asked = null; // what the reader asked for, if anything

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme ?? asked ?? (systemDark.matches ? "dark" : "light");
  themeButton.textContent = dark() ? "Light colours" : "Dark colours";
}

themeButton.addEventListener("click", () => {
  asked = dark() ? "light" : "dark";
  applyTheme();
  drawAll();
});
systemDark.addEventListener("change", () => { applyTheme(); drawAll(); });
// Paper is white. Canvases are pixels, so they are painted anew for it.
let openedToPrint = [];
addEventListener("beforeprint", () => {
  openedToPrint = [...document.querySelectorAll("td details:not([open])")];
  for (const cell of openedToPrint) cell.open = true;
  applyTheme("light");
  drawAll();
});
addEventListener("afterprint", () => {
  for (const cell of openedToPrint) cell.open = false;
  applyTheme();
  drawAll();
});

// -- start ------------------------------------------------------------------------------------------------------------

const drawn = [];

function guarded(section, act) {
  try {
    return act();
  } catch (error) {
    console.error(error);
    section.dataset.failed = String(error);
    section.append(element("p", {class: "failed"}, `This section could not be drawn: ${error.message}`));
    return null;
  }
}

function drawAll() {
  for (const {section, draw} of drawn) guarded(section, () => { section.dataset.drawn = draw(); });
}

function start() {
  applyTheme();
  const main = document.getElementById("main");
  const contents = document.getElementById("contents");
  for (const [id, title, lead, build, isPresent] of SECTIONS) {
    if (!isPresent) continue;
    const section = element("section", {id, "aria-labelledby": `${id}-title`}, element("h2", {id: `${id}-title`}, title));
    if (lead) section.append(element("p", {class: "lead"}, lead));
    main.append(section);
    contents.append(element("a", {href: `#${id}`}, title));
    const draw = guarded(section, () => build(section));
    if (draw) drawn.push({section, draw});
  }
  if (!drawn.length) main.append(element("p", {class: "card"}, "This report has no parts."));
  drawAll();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    drawAll();
  });
  document.documentElement.dataset.ready = "yes";
}

start();
