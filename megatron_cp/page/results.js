// What was run and what came of it: the verdict, curves over steps, a picture for each kind of layer, tables.

function buildResult(parent) {
  const {verdict, command, environment} = report;
  if (verdict) parent.append(element("p", {class: `verdict ${verdict.ok ? "fits" : "over"}`}, verdict.ok ? "✓ " : "✗ ", verdict.text));
  if (command) parent.append(commandBox(command, "Command"));
  if (environment?.length) parent.append(element("details", {open: true}, element("summary", {}, "Environment"), factList(environment)));
  return () => 1;
}

function factList(facts) {
  return element("dl", {class: "facts"}, ...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

function commandBox(text, label) {
  const code = element("pre", {tabindex: "0", "aria-label": label}, text);
  const copy = button("Copy", async () => {
    try { await navigator.clipboard.writeText(text); say("Copied."); }
    catch { getSelection().selectAllChildren(code); say("Selected: copy with the keyboard."); }
  });
  return element("div", {class: "command"}, code, copy);
}

// -- curves -----------------------------------------------------------------------------------------------------------

function buildCurves(parent) {
  const pair = element("div", {class: "pair"});
  parent.append(pair);
  const charts = report.curves.map(({title, x, lines}) => {
    const picture = element("div", {class: "picture"});
    const read = lines.map((line) => ({...line, x: numbers(line.x), y: numbers(line.y), smooth: line.smooth && numbers(line.smooth)}));
    pair.append(element("div", {}, element("h3", {}, title), legend(read.map((line, place) => [colourOfLine(place), line.name, "line"])), picture));
    return {picture, title, axis: x, lines: read};
  });
  if (charts.some((chart) => chart.lines.some((line) => line.smooth))) parent.append(element("p", {class: "said"}, "Faint: each step. Strong: smoothed over steps. Hover for values."));
  return () => charts.map(drawCurves).reduce((one, other) => one + other, 0);
}

const colourOfLine = (place) => DISTINCT[place % DISTINCT.length];
const finite = (values) => values.filter(Number.isFinite);

function drawCurves({picture, title, axis, lines}) {
  const [width, height] = [picture.clientWidth || 500, 290];
  const box = {left: 62, top: 10, width: width - 62 - 20, height: height - 10 - 46};
  const [xs, ys] = [lines.flatMap((line) => [...line.x]), lines.flatMap((line) => [...finite(line.y)])];
  if (!ys.length) { picture.replaceChildren(element("p", {}, "No number.")); return 0; }
  const reach = (values) => values.reduce(([lo, hi], value) => [Math.min(lo, value), Math.max(hi, value)], [Infinity, -Infinity]);
  const [[lo, hi], [least, most]] = [reach(xs), reach(ys)];
  const room = 0.04 * (most - least) || 0.04 * Math.abs(most) || 1;
  const [low, high] = [least >= 0 ? Math.max(0, least - room) : least - room, most + room];
  const x = (value) => box.left + (hi > lo ? (value - lo) / (hi - lo) : 0.5) * box.width;
  const y = (value) => box.top + box.height * (1 - (value - low) / (high - low));
  const svg = shape("svg", {width, height, role: "img", "aria-label": `${title} over ${axis}, ${plural(lines.length, "line")}`});
  for (const value of ticks(low, high, 5)) {
    svg.append(shape("line", {class: "grid", x1: box.left, x2: box.left + box.width, y1: y(value), y2: y(value)}));
    svg.append(shape("text", {class: "soft", x: box.left - 8, y: y(value) + 4, "text-anchor": "end"}, value >= 1000 ? count(value) : String(+value.toPrecision(4))));
  }
  for (const value of ticks(lo, hi, box.width / 70, 1)) svg.append(shape("text", {class: "soft", x: x(value), y: box.top + box.height + 18, "text-anchor": "middle"}, count(value)));
  svg.append(shape("line", {class: "axis", x1: box.left, x2: box.left + box.width, y1: box.top + box.height, y2: box.top + box.height}));
  svg.append(shape("text", {class: "soft", x: box.left + box.width / 2, y: height - 6, "text-anchor": "middle"}, axis));
  const stroke = (line, values, place, attributes) => svg.append(shape("path", {d: pathOf(line.x, values, x, y), fill: "none", stroke: colourOfLine(place), ...attributes}));
  // The first line is drawn last: it is what the page is about.
  for (const [place, line] of [...lines.entries()].reverse()) {
    stroke(line, line.y, place, line.smooth ? {"stroke-width": 1, "stroke-opacity": 0.35} : {"stroke-width": 2});
    if (line.x.length === 1) svg.append(shape("circle", {cx: x(line.x[0]), cy: y(line.y[0]), r: 4, fill: colourOfLine(place)}));
  }
  for (const [place, line] of [...lines.entries()].reverse()) if (line.smooth) stroke(line, line.smooth, place, line.beside ? {"stroke-width": 7, "stroke-opacity": 0.45} : {"stroke-width": 2.2});
  svg.addEventListener("pointermove", (event) => {
    const at = lo + ((event.offsetX - box.left) / box.width) * (hi - lo);
    const words = lines.map((line) => {
      const near = Math.max(0, lastAtMost(line.x, at + 0.5));
      return `${line.name}: ${decimal(line.y[near])}${line.smooth ? `, smoothed ${decimal(line.smooth[near])}` : ""} at ${axis} ${count(line.x[near])}`;
    });
    showTip(words.join("\n"), event);
  });
  svg.addEventListener("pointerleave", () => showTip(""));
  picture.replaceChildren(svg);
  return ys.length;
}

// A path with gaps where a value is no number.
function pathOf(xs, values, x, y) {
  let before = false;
  return [...values].map((value, at) => {
    const is = Number.isFinite(value);
    const piece = is ? `${before ? "L" : "M"}${x(xs[at]).toFixed(1)} ${y(value).toFixed(1)}` : "";
    before = is;
    return piece;
  }).join("");
}

// -- layers -----------------------------------------------------------------------------------------------------------

function buildLayers(parent) {
  const draws = report.layers.flatMap(({name, text, ownership, work}) => {
    parent.append(element("h3", {}, name), ...(text ?? []).map((line) => element("p", {}, line)));
    const found = [buildStream(parent, ownership, name)];
    if (work) {
      const part = element("div", {});
      parent.append(part);
      found.push(buildWork(part, work));
    }
    return found;
  });
  return () => draws.map((draw) => draw()).reduce((one, other) => one + other, 0);
}

// -- tables -----------------------------------------------------------------------------------------------------------

function buildTables(parent) {
  for (const {title, text, columns, rows, bad} of report.tables) {
    if (title) parent.append(element("h3", {}, title));
    for (const line of (text ?? "").split("\n").filter(Boolean)) parent.append(element("p", {class: /NOT met|SLOWER|FAILED/.test(line) ? "over" : null}, line));
    if (!columns.length) continue;
    const marked = new Set(bad.map(([row, column]) => `${row} ${column}`));
    const placed = rows.map((cells, row) => ({cells, row}));
    const made = columns.map((name, column) => {
      const isText = rows.some(({[column]: cell}) => typeof cell === "string" && Number.isNaN(parseFloat(cell)));
      return {
        name, text: isText, head: column === 0, long: isText,
        of: ({cells}) => (cells[column] === null ? undefined : isText || typeof cells[column] === "number" ? cells[column] : cells[column] === "" ? "" : parseFloat(cells[column])),
        show: (value, {cells, row}) => element("span", {class: marked.has(`${row} ${column}`) ? "over" : null, title: null}, typeof cells[column] === "number" ? (Number.isInteger(value) ? count(value) : decimal(value)) : cells[column], marked.has(`${row} ${column}`) ? " ✗" : ""),
      };
    });
    parent.append(sortable(`${title || "Table"}; a click on a heading sorts`, made, placed));
  }
  return () => report.tables.length;
}
