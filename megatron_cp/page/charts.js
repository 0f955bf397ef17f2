// What to run and why: the chosen candidate, bars of milliseconds and of bytes, lines over cp, and the work of ranks.

const sum = (parts) => Object.values(parts ?? {}).reduce((total, value) => total + value, 0);
const stepOf = (candidate) => candidate.milliseconds?.step;
const fits = (candidate) => candidate.limit_bytes === undefined || candidate.bytes === undefined || sum(candidate.bytes) <= candidate.limit_bytes;
const FEW_BARS = 12;

// Names of the parts over all candidates, in the order in which they are first met.
function partNames(candidates, field) {
  const names = new Set(candidates.flatMap((candidate) => Object.keys(candidate[field] ?? {})));
  names.delete("step");
  return [...names];
}

// -- the chosen candidate ---------------------------------------------------------------------------------------------

function buildChoice(parent) {
  const candidates = report.candidates ?? [];
  const chosen = candidates.find((candidate) => candidate.chosen);
  if (report.summary) parent.append(element("p", {}, element("strong", {}, report.summary)));
  if (chosen) parent.append(...chosenParts(chosen, candidates));
  else if (candidates.length) parent.append(element("p", {class: "over"}, "No candidate is chosen."));
  if (report.facts?.length) {
    parent.append(element("h3", {}, "What was assumed"));
    parent.append(factList(report.facts));
  }
  let draw = () => 1;
  if (candidates.some((candidate) => sum(candidate.milliseconds) > 0)) {
    parent.append(element("h3", {}, "Milliseconds of a step, by part"));
    draw = stackedBars(parent, candidates, timeBars(candidates));
  }
  if (candidates.length) parent.append(element("h3", {}, "All candidates"), candidateTable(candidates));
  return draw;
}

function chosenParts(chosen, candidates) {
  const tiles = [];
  const tile = (name, value, unit) => tiles.push(element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, unit))));
  if (stepOf(chosen) !== undefined) tile("one step", decimal(stepOf(chosen)), "ms");
  if (chosen.tokens_per_second_per_gpu !== undefined) tile("throughput", count(chosen.tokens_per_second_per_gpu), "tokens/s per GPU");
  if (chosen.mfu !== undefined) tile("MFU", decimal(100 * chosen.mfu), "%");
  if (chosen.bytes) tile("memory of a rank", bytes(sum(chosen.bytes)), chosen.limit_bytes === undefined ? "" : `of ${bytes(chosen.limit_bytes)}`);
  // Of the same size: a step of twice the ranks is shorter, and no better for that.
  const next = candidates.find((candidate) => !candidate.chosen && candidate.cp === chosen.cp && stepOf(candidate) !== undefined && fits(candidate));
  if (next && stepOf(chosen) > 0) tile("next that fits at this cp", `${decimal(stepOf(next) / stepOf(chosen))} ×`, `the time: ${next.name}`);
  const found = [element("p", {}, `Chosen: ${chosen.name}.`)];
  if (chosen.flags) found.push(commandBox(chosen.flags, "Flags of the chosen candidate"));
  if (tiles.length) found.push(element("dl", {class: "tiles"}, ...tiles));
  return found;
}

function candidateTable(candidates) {
  const has = (field) => candidates.some((candidate) => candidate[field] !== undefined && candidate[field] !== "");
  const columns = [{name: "candidate", of: (row) => row.name, head: true, text: true, long: true, show: (name, row) => (row.chosen ? `${name} (chosen)` : name)}];
  if (has("cp")) columns.push({name: "cp", of: (row) => row.cp, show: count});
  if (has("milliseconds")) {
    columns.push({name: "step, ms", of: stepOf, show: decimal});
    for (const part of partNames(candidates, "milliseconds")) columns.push({name: `${part}, ms`, of: (row) => row.milliseconds?.[part], show: decimal});
  }
  if (has("tokens_per_second_per_gpu")) columns.push({name: "tokens/s per GPU", of: (row) => row.tokens_per_second_per_gpu, show: count});
  if (has("mfu")) columns.push({name: "MFU", of: (row) => row.mfu, show: percent});
  if (has("bytes")) {
    columns.push({name: "memory", of: (row) => (row.bytes ? sum(row.bytes) : undefined), show: (value, row) => element("span", {class: fits(row) ? null : "over"}, bytes(value))});
    if (has("limit_bytes")) columns.push({name: "fits", of: (row) => (row.bytes ? (fits(row) ? "yes" : "no") : undefined), text: true, show: (text) => element("span", {class: text === "yes" ? "fits" : "over"}, text)});
  }
  if (has("why_not")) columns.push({name: "why not", of: (row) => row.why_not, text: true, long: true});
  if (has("flags")) columns.push({name: "flags", of: (row) => row.flags, text: true, show: flagsCell});
  return sortable("Candidates; a click on a heading sorts", columns, candidates, {classOf: (row) => (row.chosen ? "chosen" : null)});
}

// Flags are long: in a column of their own they would make the table wider than any window.
function flagsCell(text) {
  return element("details", {}, element("summary", {}, "show"), element("code", {}, text));
}

// -- stacked bars -----------------------------------------------------------------------------------------------------

function timeBars(candidates) {
  const names = partNames(candidates, "milliseconds");
  const rest = candidates.some((candidate) => restOf(candidate) > 0);
  return {
    parts: (candidate) => [...names.map((name) => [name, candidate.milliseconds?.[name] ?? 0]), ["other", restOf(candidate)]],
    names: rest ? [...names, "other"] : names,
    show: (value) => `${decimal(value)} ms`,
    label: (candidate) => (stepOf(candidate) === undefined ? "" : `${decimal(stepOf(candidate))} ms`),
    whole: stepOf,
    wholeName: "step, where parts overlap",
  };
}

// What a step takes beyond its parts; rounding aside.
function restOf({milliseconds}) {
  if (milliseconds?.step === undefined) return 0;
  const rest = 2 * milliseconds.step - sum(milliseconds);
  return rest > 0.005 * milliseconds.step ? rest : 0;
}

function memoryBars(candidates) {
  const names = partNames(candidates, "bytes");
  return {
    parts: (candidate) => names.map((name) => [name, candidate.bytes?.[name] ?? 0]),
    names,
    show: bytes,
    label: (candidate) => (candidate.bytes ? `${bytes(sum(candidate.bytes))}${fits(candidate) ? "" : ", does not fit"}` : ""),
    whole: (candidate) => candidate.limit_bytes,
    wholeName: "limit",
    isLimit: true,
  };
}

// A bar for each candidate, its parts end to end. Returns a function that draws.
function stackedBars(parent, candidates, bars) {
  const picture = element("div", {class: "picture"});
  const colourOf = new Map(bars.names.map((name, place) => [name, name === "other" ? "#9a9a9a" : DISTINCT[place % DISTINCT.length]]));
  const isMarked = (candidate) => bars.whole(candidate) !== undefined && (bars.isLimit || bars.whole(candidate) < 0.995 * sum(Object.fromEntries(bars.parts(candidate))));
  const entries = bars.names.map((name) => [colourOf.get(name), name]);
  if (candidates.some(isMarked)) entries.push(["currentColor", bars.wholeName, "line"]);
  let shown = candidates.length > FEW_BARS ? candidates.slice(0, FEW_BARS) : candidates;
  parent.append(legend(entries), picture);
  const draw = () => drawBars(picture, shown, bars, colourOf, isMarked);
  if (shown.length < candidates.length) {
    const more = button(`Show all ${count(candidates.length)} candidates`, () => { shown = candidates; more.remove(); draw(); });
    parent.append(element("div", {class: "controls"}, more));
  }
  return draw;
}

function drawBars(picture, candidates, bars, colourOf, isMarked) {
  const width = picture.clientWidth || 800;
  const isNarrow = width < 640;
  const left = isNarrow ? 0 : Math.min(320, width * 0.34);
  const [right, high, pitch] = [isNarrow ? 4 : 150, 20, isNarrow ? 46 : 30];
  const most = Math.max(...candidates.map((candidate) => Math.max(sum(Object.fromEntries(bars.parts(candidate))), isMarked(candidate) ? bars.whole(candidate) : 0)), 1e-9);
  const scale = (width - left - right) / most;
  const svg = shape("svg", {width, height: candidates.length * pitch + 4, role: "group", "aria-label": "Bars for each candidate"});
  candidates.forEach((candidate, row) => {
    const y = row * pitch + (isNarrow ? 20 : 4);
    const name = shape("text", isNarrow ? {x: 0, y: y - 6} : {x: left - 10, y: y + high / 2 + 4, "text-anchor": "end"}, clipped(candidate.name, isNarrow ? width - 150 : left - 10));
    if (candidate.chosen) name.setAttribute("font-weight", "700");
    name.append(shape("title", {}, candidate.name));
    svg.append(name);
    let x = left;
    for (const [part, value] of bars.parts(candidate)) {
      if (!(value > 0)) continue;
      const wide = value * scale;
      const rect = shape("rect", {x, y, width: Math.max(0.5, wide - (wide > 3 ? 1 : 0)), height: high, fill: colourOf.get(part)});
      svg.append(explained(rect, `${candidate.name}\n${part}: ${bars.show(value)}`));
      x += wide;
    }
    if (isMarked(candidate)) {
      const at = left + bars.whole(candidate) * scale;
      const mark = shape("line", {x1: at, x2: at, y1: y - 3, y2: y + high + 3, stroke: "currentColor", "stroke-width": 2.5});
      svg.append(explained(mark, `${candidate.name}\n${bars.wholeName}: ${bars.show(bars.whole(candidate))}`));
      x = Math.max(x, at);
    }
    const place = isNarrow ? {x: width, y: y - 6, "text-anchor": "end"} : {x: x + 7, y: y + high / 2 + 4};
    svg.append(shape("text", place, bars.label(candidate)));
  });
  picture.replaceChildren(svg);
  return svg.querySelectorAll("rect").length;
}

// A text that is about as wide as it may be: the whole of it is in its title.
function clipped(text, width) {
  const most = Math.max(6, Math.floor(width / 7));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// -- over cp ----------------------------------------------------------------------------------------------------------

const FEW_LINES = 8;
const DASHES = [null, "7 4", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 2 2"];

// The fastest candidate of each kind at each cp, the kinds with the fastest first.
function linesOverCp(candidates) {
  const kinds = new Map();
  for (const candidate of candidates.filter((each) => each.cp !== undefined && stepOf(each) !== undefined)) {
    const points = kinds.get(candidate.kind) ?? new Map();
    const before = points.get(candidate.cp);
    if (before === undefined || stepOf(candidate) < stepOf(before) || candidate.chosen) points.set(candidate.cp, candidate);
    kinds.set(candidate.kind, points);
  }
  const lines = [...kinds].map(([kind, points]) => ({kind, points: [...points.values()].sort((one, other) => one.cp - other.cp)}));
  const best = (line) => Math.min(...line.points.map((point) => (point.chosen ? 0 : stepOf(point))));
  return lines.sort((one, other) => best(one) - best(other));
}

function buildOverCp(parent) {
  const lines = linesOverCp(report.candidates);
  const named = lines.slice(0, FEW_LINES);
  const pair = element("div", {class: "pair"});
  const entries = named.map((line, place) => [DISTINCT[place], line.kind, "line"]);
  if (lines.length > named.length) entries.push(["#9a9a9a", plural(lines.length - named.length, "other"), "line"]);
  parent.append(legend(entries), pair);
  parent.append(element("p", {class: "said"}, "A ring marks the chosen candidate, a hollow point one that does not fit in memory."));
  const charts = [["one step, ms", stepOf, (value) => `${decimal(value)} ms`]];
  if (report.candidates.some((each) => each.tokens_per_second_per_gpu !== undefined)) charts.push(["tokens/s per GPU", (each) => each.tokens_per_second_per_gpu, (value) => `${count(value)} tokens/s per GPU`]);
  const pictures = charts.map(([title]) => {
    const picture = element("div", {class: "picture"});
    pair.append(element("div", {}, element("h3", {}, title), picture));
    return picture;
  });
  return () => charts.map(([title, of, show], place) => drawLines(pictures[place], lines, title, of, show)).reduce((one, other) => one + other, 0);
}

function drawLines(picture, lines, title, of, show) {
  const [width, height] = [picture.clientWidth || 500, 290];
  const box = {left: 62, top: 10, width: width - 62 - 20, height: height - 10 - 46};
  const points = lines.flatMap((line) => line.points).filter((point) => of(point) !== undefined);
  const cps = [...new Set(points.map((point) => point.cp))].sort((one, other) => one - other);
  const [lo, hi] = [Math.log2(cps[0]), Math.log2(cps.at(-1))];
  const most = Math.max(...points.map(of)) * 1.05 || 1;
  const x = (cp) => box.left + (hi > lo ? (Math.log2(cp) - lo) / (hi - lo) : 0.5) * box.width;
  const y = (value) => box.top + box.height * (1 - value / most);
  const svg = shape("svg", {width, height, role: "group", "aria-label": `${title} against cp`});
  for (const value of ticks(0, most, 5)) {
    svg.append(shape("line", {class: "grid", x1: box.left, x2: box.left + box.width, y1: y(value), y2: y(value)}));
    svg.append(shape("text", {class: "soft", x: box.left - 8, y: y(value) + 4, "text-anchor": "end"}, value >= 1000 ? count(value) : String(+value.toPrecision(4))));
  }
  let taken = -1e9;
  for (const cp of cps) {
    if (x(cp) - taken < 26) continue;
    taken = x(cp);
    svg.append(shape("text", {class: "soft", x: x(cp), y: box.top + box.height + 18, "text-anchor": "middle"}, String(cp)));
  }
  svg.append(shape("line", {class: "axis", x1: box.left, x2: box.left + box.width, y1: y(0), y2: y(0)}));
  svg.append(shape("text", {class: "soft", x: box.left + box.width / 2, y: height - 6, "text-anchor": "middle"}, "context-parallel size (logarithmic)"));
  [...lines.keys()].reverse().forEach((place) => drawLine(svg, lines[place].points.filter((point) => of(point) !== undefined), place, {x, y: (point) => y(of(point)), words: (point) => `${point.name}\n${show(of(point))}${fits(point) ? "" : "\ndoes not fit in memory"}`}));
  picture.replaceChildren(svg);
  return points.length;
}

function drawLine(svg, points, place, {x, y, words}) {
  const isNamed = place < FEW_LINES;
  const colour = isNamed ? DISTINCT[place] : "#9a9a9a";
  const path = points.map((point, at) => `${at ? "L" : "M"}${x(point.cp).toFixed(1)} ${y(point).toFixed(1)}`).join("");
  svg.append(shape("path", {d: path, fill: "none", stroke: colour, "stroke-width": isNamed ? 2.2 : 1, "stroke-dasharray": isNamed ? DASHES[place] : null}));
  for (const point of points) {
    if (point.chosen) svg.append(shape("circle", {cx: x(point.cp), cy: y(point), r: 9, fill: "none", stroke: css("--ink"), "stroke-width": 2}));
    const dot = shape("circle", {cx: x(point.cp), cy: y(point), r: isNamed ? 4.5 : 3, fill: fits(point) ? colour : css("--card"), stroke: colour, "stroke-width": 1.5});
    svg.append(explained(dot, words(point)));
  }
}

// -- memory -----------------------------------------------------------------------------------------------------------

function buildMemory(parent) {
  const candidates = report.candidates.filter((candidate) => candidate.bytes);
  return stackedBars(parent, candidates, memoryBars(candidates));
}

// -- work -------------------------------------------------------------------------------------------------------------

function buildWork(parent, given = report.work) {
  const work = numbers(given.values);
  const total = work.reduce((one, other) => one + other, 0);
  const mean = total / work.length;
  const busiest = work.indexOf(work.reduce((one, other) => Math.max(one, other), 0));
  const relative = (rank) => (mean > 0 ? `${(work[rank] / mean).toFixed(3)} times the mean` : "");
  const words = (rank) => `rank ${count(rank)}${onHost(rank)}\n${amount(work[rank], given.unit)}\n${relative(rank)}`.trim();
  parent.append(element("p", {}, `Mean ${amount(mean, given.unit)}. Busiest: rank ${count(busiest)} with ${amount(work[busiest], given.unit)}${mean > 0 ? ", " : ""}${relative(busiest)}.`));
  const picture = element("div", {class: "picture"});
  parent.append(picture);
  return () => drawWork(picture, work, mean, busiest, words);
}

function drawWork(picture, work, mean, busiest, words) {
  const [width, height] = [picture.clientWidth || 800, 190];
  const box = {left: 12, top: 16, width: width - 24, height: height - 16 - 24};
  const most = Math.max(work[busiest], mean) || 1;
  const pitch = box.width / work.length;
  const gap = pitch > 5 ? Math.min(4, pitch * 0.2) : 0;
  const y = (value) => box.top + box.height * (1 - value / most);
  const bar = (rank) => `M${(box.left + rank * pitch + gap / 2).toFixed(2)} ${(box.top + box.height).toFixed(2)}V${y(work[rank]).toFixed(2)}h${(pitch - gap).toFixed(2)}V${box.top + box.height}z`;
  const svg = shape("svg", {width, height, role: "img", "aria-label": `Work of ${plural(work.length, "rank")}; the busiest is rank ${busiest}`});
  svg.append(shape("path", {d: [...work.keys()].filter((rank) => rank !== busiest).map(bar).join(""), fill: DISTINCT[0]}));
  svg.append(shape("path", {d: bar(busiest), fill: DISTINCT[5]}));
  for (const border of hostBorders()) if (report.hosts.length * 4 < width) svg.append(shape("line", {class: "axis", x1: box.left + border * pitch, x2: box.left + border * pitch, y1: box.top + box.height, y2: box.top + box.height + 8}));
  svg.append(shape("line", {x1: box.left, x2: box.left + box.width, y1: y(mean), y2: y(mean), stroke: css("--ink"), "stroke-width": 1.5, "stroke-dasharray": "6 4"}));
  svg.append(shape("text", {x: box.left + box.width, y: Math.max(11, y(mean) - 5), "text-anchor": "end"}, "mean"));
  const step = Math.max(1, Math.ceil(34 / pitch));
  const nice = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256, 512, 1024, 2048, 4096].find((each) => each >= step) ?? step;
  for (let rank = 0; rank < work.length; rank += nice) svg.append(shape("text", {class: "soft", x: box.left + (rank + 0.5) * pitch, y: height - 6, "text-anchor": "middle"}, String(rank)));
  svg.addEventListener("pointermove", (event) => {
    const rank = Math.floor((event.offsetX - box.left) / pitch);
    showTip(rank >= 0 && rank < work.length ? words(rank) : "", event);
  });
  svg.addEventListener("pointerleave", () => showTip(""));
  picture.replaceChildren(svg);
  return work.length;
}
