// The streams of the ranks over time: three rows for each rank, or, for many ranks, a heat map and the rows of some.

const MANY = 32; // ranks of which all rows are drawn
const MARGIN = {left: 118, right: 10, axis: 28};
const KIND_COLOURS = {kernel: DISTINCT[0], product: DISTINCT[2], copy: DISTINCT[4], transfer: DISTINCT[1], wait: "#8b8b8b"};
const KIND_WORDS = {kernel: "kernel", product: "matrix product", copy: "copy in memory", transfer: "transfer", wait: "wait"};

function buildTimeline(parent) {
  const lanes = readTimeline();
  const {timeline} = report;
  if (timeline.layers.length) parent.append(element("p", {}, `Layers in this picture: ${timeline.layers.join(", ")}.`));
  lanes.isMany = report.ranks > MANY;
  lanes.shown = lanes.isMany ? notable(lanes) : [...Array(report.ranks).keys()];
  lanes.view = new View(lanes.from, lanes.to, (lanes.to - lanes.from) / 1e5);
  const picture = element("div", {class: "picture"});
  const canvas = element("canvas");
  picture.append(canvas);
  const draw = () => drawTimeline(canvas, lanes);
  const buttons = movable(canvas, {
    views: {x: lanes.view},
    box: () => lanes.box,
    redraw: draw,
    hover: (x, y) => timelineWords(lanes, x, y),
    click: (x, y) => {
      if (lanes.isMany && isInside(lanes.map, x, y)) { addRank(lanes, mapRank(lanes, y)); draw(); }
    },
    told: () => `From ${duration(lanes.view.lo)} to ${duration(lanes.view.hi)}.`,
  });
  canvas.setAttribute("aria-label", `Timeline of ${plural(report.ranks, "rank")} over ${duration(lanes.to - lanes.from)}. Arrow keys move, plus and minus zoom. The table of ranks has the numbers.`);
  parent.append(element("div", {class: "controls"}, ...buttons, ...(lanes.isMany ? manyControls(lanes, draw) : [])));
  const key = element("div");
  parent.append(key, legend(timeline.kinds.map((kind) => [KIND_COLOURS[kind], KIND_WORDS[kind], kind === "wait" ? "thin" : "box"])), picture);
  const way = "The wheel zooms, dragging moves. Rows of a rank: compute, send, receive.";
  parent.append(element("p", {class: "said"}, lanes.isMany ? `${way} The map shows how busy each rank is over time; a click on it shows or hides that rank's rows.` : way));
  return () => {
    key.replaceChildren(...(lanes.isMany ? [legend([0, 0.25, 0.5, 0.75, 1].map((share) => [rgb(busyness(share)), `${count(100 * share)} % busy`]))] : []));
    return draw();
  };
}

// Events as columns, where each rank's streams begin among them, and how long each rank is busy.
function readTimeline() {
  const {timeline} = report;
  const columns = Object.fromEntries(["rank", "stream", "kind", "name", "peer", "start", "end"].map((name) => [name, numbers(timeline[name])]));
  const time = (ticks) => Float64Array.from(ticks, (tick) => (timeline.origin + timeline.tick * tick) * timeline.seconds);
  const lanes = {...columns, start: time(columns.start), end: time(columns.end), streams: timeline.streams.length};
  lanes.offsets = new Uint32Array(report.ranks * lanes.streams + 1);
  lanes.longest = new Float64Array(report.ranks * lanes.streams);
  lanes.busy = new Float64Array(report.ranks * lanes.streams);
  lanes.wait = timeline.kinds.indexOf("wait");
  lanes.from = Infinity;
  lanes.to = -Infinity;
  lanes.start.forEach((start, at) => {
    const lane = lanes.rank[at] * lanes.streams + lanes.stream[at];
    const span = lanes.end[at] - start;
    lanes.offsets[lane + 1]++;
    lanes.longest[lane] = Math.max(lanes.longest[lane], span);
    if (lanes.kind[at] !== lanes.wait) lanes.busy[lane] += span;
    lanes.from = Math.min(lanes.from, start);
    lanes.to = Math.max(lanes.to, lanes.end[at]);
  });
  for (let lane = 0; lane < lanes.longest.length; lane++) lanes.offsets[lane + 1] += lanes.offsets[lane];
  if (!(lanes.to > lanes.from)) [lanes.from, lanes.to] = [lanes.from === Infinity ? 0 : lanes.from, (lanes.from === Infinity ? 0 : lanes.from) + 1e-6];
  return lanes;
}

const computing = (lanes, rank) => lanes.busy[rank * lanes.streams];

// The ranks whose compute streams are busiest, in the middle, and least busy.
function notable(lanes) {
  const order = [...Array(report.ranks).keys()].sort((one, other) => computing(lanes, other) - computing(lanes, one));
  lanes.titles = new Map([[order.at(-1), "least busy"], [order[order.length >> 1], "median"], [order[0], "busiest"]]);
  return [order[0], order[order.length >> 1], order.at(-1)];
}

function addRank(lanes, rank) {
  if (lanes.shown.includes(rank)) lanes.shown = lanes.shown.filter((each) => each !== rank);
  else lanes.shown = [...lanes.shown, rank].slice(-10);
}

function manyControls(lanes, draw) {
  lanes.mapped = 0;
  const select = element("select", {onchange: () => { lanes.mapped = Number(select.value); draw(); }},
    ...[...report.timeline.streams, "waits of any stream"].map((name, place) => element("option", {value: place}, name)));
  const number = element("input", {type: "number", min: 0, max: report.ranks - 1});
  const add = () => {
    const rank = Number(number.value);
    if (number.value === "" || !Number.isInteger(rank) || rank < 0 || rank >= report.ranks) return say(`Give a rank from 0 to ${report.ranks - 1}.`);
    addRank(lanes, rank);
    draw();
  };
  number.addEventListener("keydown", (event) => { if (event.key === "Enter") add(); });
  return [element("label", {}, "Map of", select), element("label", {}, "Rank", number), button("Show or hide its rows", add)];
}

// -- painting ---------------------------------------------------------------------------------------------------------

function drawTimeline(canvas, lanes) {
  const many = lanes.isMany;
  const shown = lanes.shown.length;
  const high = many ? 13 : shown <= 4 ? 18 : shown <= 8 ? 13 : shown <= 16 ? 9 : 6;
  const between = many || shown <= 8 ? 10 : 6;
  const pitch = high * lanes.streams + between;
  const map = many ? Math.min(360, Math.max(180, report.ranks * 3)) : 0;
  const top = many ? map + 12 : 0;
  const on = fitted(canvas, top + pitch * shown + MARGIN.axis);
  const {context, width} = on;
  const left = width < 640 ? 78 : MARGIN.left;
  lanes.box = {left, top: 0, width: width - left - MARGIN.right, height: top + pitch * shown};
  lanes.map = {left, top: 0, width: lanes.box.width, height: map};
  lanes.rows = {top, high, pitch};
  if (many) drawMap(on, lanes);
  const marks = lanes.shown.reduce((total, rank, place) => total + drawRank(context, lanes, rank, top + place * pitch), 0);
  drawAxis(context, lanes.box, lanes.view.lo - lanes.from, lanes.view.hi - lanes.from, durationTick);
  return marks;
}

// A time on the axis, with as many digits as its step needs.
function durationTick(seconds, step) {
  const [scale, unit] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : step >= 1e-7 ? [1e6, "µs"] : [1e9, "ns"];
  const digits = Math.min(12, Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9)));
  return `${(seconds * scale).toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits})} ${unit}`;
}

function drawRank(context, lanes, rank, top) {
  const {high} = lanes.rows;
  const {left, width} = lanes.box;
  context.textAlign = "right";
  context.fillStyle = css("--ink");
  const title = lanes.titles?.get(rank);
  const middle = top + (high * lanes.streams) / 2;
  context.fillText(`rank ${count(rank)}`, left - 8, title ? middle - 7 : middle);
  context.fillStyle = css("--soft");
  if (title) context.fillText(title, left - 8, middle + 8);
  let marks = 0;
  for (let stream = 0; stream < lanes.streams; stream++) {
    const y = top + stream * high;
    context.fillStyle = css("--faint");
    context.fillRect(left, y, width, high - 1);
    marks += drawLane(context, lanes, rank * lanes.streams + stream, y);
  }
  return marks;
}

function firstShown({offsets, start, longest, view}, lane) {
  const list = start.subarray(offsets[lane], offsets[lane + 1]);
  return offsets[lane] + Math.max(0, lastAtMost(list, view.lo - longest[lane]));
}

function drawLane(context, lanes, lane, y) {
  const {view, start, end, kind, name, box, rows, offsets} = lanes;
  const scale = box.width / (view.hi - view.lo);
  const colours = report.timeline.kinds.map((each) => KIND_COLOURS[each]);
  const inks = colours.map((colour) => inkOn(channels(colour)));
  const right = box.left + box.width;
  const drawn = new Float64Array(colours.length).fill(-1e9); // up to where each kind is painted: events below half a pixel are painted once
  let marks = 0;
  for (let at = firstShown(lanes, lane); at < offsets[lane + 1] && start[at] < view.hi; at++) {
    if (end[at] < view.lo) continue;
    const from = Math.max(box.left, box.left + (start[at] - view.lo) * scale);
    const to = Math.min(right, box.left + (end[at] - view.lo) * scale);
    marks++;
    if (to - drawn[kind[at]] < 0.5) continue;
    const wide = Math.min(right - from, Math.max(0.6, to - from > 3 ? to - from - 0.6 : to - from));
    drawn[kind[at]] = from + wide;
    const isWait = kind[at] === lanes.wait;
    const high = rows.high - 1;
    context.fillStyle = colours[kind[at]];
    context.fillRect(from, isWait ? y + high * 0.35 : y, wide, isWait ? Math.max(1, high * 0.3) : high);
    if (high < 11 || wide < 34 || isWait) continue;
    context.fillStyle = inks[kind[at]];
    context.textAlign = "left";
    const text = clippedTo(context, report.timeline.names[name[at]], wide - 8);
    if (text) context.fillText(text, from + 4, y + high / 2 + 1);
  }
  return marks;
}

function clippedTo(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const most = Math.floor((text.length * width) / context.measureText(text).width) - 1;
  return most > 2 ? `${text.slice(0, most)}…` : "";
}

// The busy share of every cell: ranks that fall into one row of pixels are averaged.
function drawMap(on, lanes) {
  const {map, view} = lanes;
  const image = imageOver(on, map);
  const shares = busyShares(lanes, image.width, image.height);
  const table = Uint32Array.from({length: 256}, (_, at) => word(busyness(at / 255)));
  const ranks = Math.max(1, report.ranks);
  for (let y = 0; y < image.height; y++) {
    const row = report.ranks >= image.height ? y : Math.floor((y * ranks) / image.height);
    for (let x = 0; x < image.width; x++) image.words[y * image.width + x] = table[Math.min(255, Math.round(255 * shares[row * image.width + x]))];
  }
  image.done();
  const {context} = on;
  context.fillStyle = css("--soft");
  context.textAlign = "right";
  for (const rank of ticks(0, report.ranks - 1, map.height / 40, 1)) context.fillText(`rank ${count(rank)}`, map.left - 8, Math.max(8, map.top + ((rank + 0.5) / ranks) * map.height));
  context.fillStyle = css("--accent");
  for (const rank of lanes.shown) {
    const y = map.top + ((rank + 0.5) / ranks) * map.height;
    context.beginPath();
    context.moveTo(map.left, y);
    context.lineTo(map.left - 6, y - 4);
    context.lineTo(map.left - 6, y + 4);
    context.fill();
  }
  lanes.shares = {values: shares, width: image.width, rows: Math.min(report.ranks, image.height), lo: view.lo, hi: view.hi};
}

function busyShares(lanes, width, height) {
  const {view, start, end, kind, rank, stream} = lanes;
  const rows = Math.min(report.ranks, height);
  const shares = new Float32Array(rows * width);
  const perRow = new Float32Array(rows);
  const rowOf = Uint32Array.from({length: report.ranks}, (_, each) => Math.floor((each * rows) / report.ranks));
  rowOf.forEach((row) => { perRow[row]++; });
  const scale = width / (view.hi - view.lo);
  const ofWaits = lanes.mapped === lanes.streams;
  for (let at = 0; at < start.length; at++) {
    if (ofWaits ? kind[at] !== lanes.wait : stream[at] !== lanes.mapped || kind[at] === lanes.wait) continue;
    const from = Math.max(0, (start[at] - view.lo) * scale);
    const to = Math.min(width, (end[at] - view.lo) * scale);
    if (!(to > from)) continue;
    const row = rowOf[rank[at]] * width;
    const part = 1 / perRow[rowOf[rank[at]]];
    const [first, last] = [Math.floor(from), Math.min(width - 1, Math.floor(to))];
    if (first === last) { shares[row + first] += (to - from) * part; continue; }
    shares[row + first] += (first + 1 - from) * part;
    for (let x = first + 1; x < last; x++) shares[row + x] += part;
    shares[row + last] += (to - last) * part;
  }
  return shares;
}

// -- what the pointer is on -------------------------------------------------------------------------------------------

function mapRank({map}, y) {
  return Math.min(report.ranks - 1, Math.floor(((y - map.top) / map.height) * report.ranks));
}

function timelineWords(lanes, x, y) {
  const {box, map, view, rows} = lanes;
  if (!isInside(box, x, y)) return "";
  const time = view.lo + ((x - box.left) / box.width) * (view.hi - view.lo);
  if (lanes.isMany && isInside(map, x, y)) return mapWords(lanes, x, y, time);
  const place = Math.floor((y - rows.top) / rows.pitch);
  const stream = Math.floor((y - rows.top - place * rows.pitch) / rows.high);
  if (y < rows.top || place >= lanes.shown.length || stream >= lanes.streams) return "";
  const rank = lanes.shown[place];
  const at = eventAt(lanes, rank * lanes.streams + stream, time, (3 * (view.hi - view.lo)) / box.width);
  const name = report.timeline.streams[stream];
  if (at === null) return `rank ${count(rank)}${onHost(rank)}, ${name}\nidle at ${duration(time - lanes.from)}`;
  return eventWords(lanes, at, rank, name);
}

function mapWords(lanes, x, y, time) {
  const {values, width, rows} = lanes.shares;
  const rank = mapRank(lanes, y);
  const column = Math.min(width - 1, Math.floor(((x - lanes.map.left) / lanes.map.width) * width));
  const row = Math.floor((rank * rows) / report.ranks);
  const share = Math.min(1, values[row * width + column]);
  const first = Math.ceil((row * report.ranks) / rows);
  const last = Math.ceil(((row + 1) * report.ranks) / rows) - 1;
  const who = last > first ? `ranks ${count(first)} to ${count(last)}` : `rank ${count(first)}${onHost(first)}`;
  const what = lanes.mapped === lanes.streams ? "waits" : report.timeline.streams[lanes.mapped];
  return `${who}, ${what}\n${percent(share)} of the time about ${duration(time - lanes.from)}`;
}

function eventAt(lanes, lane, time, near) {
  let [best, distance] = [null, near];
  for (let at = Math.max(lanes.offsets[lane], firstShown(lanes, lane)); at < lanes.offsets[lane + 1] && lanes.start[at] <= time + near; at++) {
    const away = Math.max(0, lanes.start[at] - time, time - lanes.end[at]);
    if (away <= distance) [best, distance] = [at, away];
  }
  return best;
}

function eventWords(lanes, at, rank, stream) {
  const peer = lanes.peer[at] - 1;
  const way = {send: "to", receive: "from"}[stream] ?? "with";
  return [
    report.timeline.names[lanes.name[at]],
    `rank ${count(rank)}${onHost(rank)}, ${stream}: ${KIND_WORDS[report.timeline.kinds[lanes.kind[at]]]}`,
    `takes ${duration(lanes.end[at] - lanes.start[at])}, from ${duration(lanes.start[at] - lanes.from)}`,
    ...(peer >= 0 ? [`${way} rank ${count(peer)}${onHost(peer)}`] : []),
  ].join("\n");
}
