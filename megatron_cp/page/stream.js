// Who holds what: the packed stream with its documents, as a band coloured by rank and as a row for each rank.

function buildStream(parent, ownership = report.ownership, name = "") {
  const [lengths, starts, ends, ranks] = ["lengths", "starts", "ends", "ranks"].map((field) => numbers(ownership[field]));
  const borders = new Float64Array(lengths.length + 1);
  lengths.forEach((length, document) => { borders[document + 1] = borders[document] + length; });
  const total = borders[lengths.length];
  const stream = {lengths, starts, ends, ranks, borders, total, view: new View(0, Math.max(1, total), Math.min(32, Math.max(1, total))), chosen: null};
  parent.append(element("p", {}, `${plural(total, "token")} in ${plural(lengths.length, "document")}, held in ${plural(starts.length, "fragment")} by ${plural(report.ranks, "rank")}.`));
  const number = element("input", {type: "number", min: 0, max: report.ranks - 1, placeholder: "all"});
  const choose = (rank) => { stream.chosen = rank; number.value = rank ?? ""; };
  const picture = element("div", {class: "picture"});
  const canvas = element("canvas");
  picture.append(canvas);
  const draw = () => drawStream(canvas, stream);
  number.addEventListener("input", () => {
    const rank = number.value === "" ? null : Number(number.value);
    stream.chosen = Number.isInteger(rank) && rank >= 0 && rank < report.ranks ? rank : null;
    draw();
  });
  const buttons = movable(canvas, {
    views: {x: stream.view},
    box: () => stream.box,
    redraw: draw,
    hover: (x, y) => streamWords(stream, x, y),
    click: (x, y) => {
      const found = fragmentAt(stream, x, y);
      const rank = found === null ? null : stream.ranks[found];
      choose(rank === stream.chosen ? null : rank);
      draw();
    },
    told: () => `Tokens ${count(stream.view.lo)} to ${count(stream.view.hi)}.`,
  });
  canvas.setAttribute("aria-label", `${name && `${name}. `}Stream of ${plural(total, "token")}: which rank holds which. Arrow keys move, plus and minus zoom. The table of ranks has the numbers.`);
  parent.append(element("div", {class: "controls"}, ...buttons, element("label", {}, "Only rank", number)));
  parent.append(rankLegend(), picture);
  parent.append(element("p", {class: "said"}, "The wheel zooms, dragging moves, a click shows one rank alone. First row: documents; second: the rank that holds each token; below: a row for each rank."));
  return draw;
}

function rankLegend() {
  if (report.ranks <= DISTINCT.length) return legend([...Array(report.ranks).keys()].map((rank) => [rgb(rankColour(rank)), `rank ${rank}`]));
  const last = report.ranks - 1;
  return legend([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * last)).map((rank) => [rgb(rankColour(rank)), `rank ${count(rank)}`]));
}

// The last place of a rising list that is at most a value; -1 if none is.
function lastAtMost(list, value) {
  let [lo, hi] = [0, list.length];
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (list[middle] <= value) lo = middle + 1;
    else hi = middle;
  }
  return lo - 1;
}

const DOCUMENTS = {top: 0, height: 20};
const BAND = {top: 24, height: 40};

function drawStream(canvas, stream) {
  const rows = Math.max(90, Math.min(300, report.ranks * 12));
  const on = fitted(canvas, BAND.top + BAND.height + 6 + rows + 26);
  const {context, width} = on;
  const box = {left: 70, top: DOCUMENTS.top, width: width - 70 - 8, height: BAND.top + BAND.height + 6 + rows};
  stream.box = box;
  stream.rows = {left: box.left, width: box.width, top: BAND.top + BAND.height + 6, height: rows};
  drawDocuments(context, stream);
  paintBand(on, stream);
  paintRows(on, stream);
  context.strokeStyle = css("--line");
  context.lineWidth = 1;
  context.strokeRect(box.left - 0.5, stream.rows.top - 0.5, box.width + 1, rows + 1);
  context.fillStyle = css("--soft");
  context.textAlign = "right";
  context.fillText("document", box.left - 6, DOCUMENTS.top + 10);
  context.fillText("holder", box.left - 6, BAND.top + BAND.height / 2);
  const pitch = rows / Math.max(1, report.ranks);
  for (const rank of new Set(ticks(0, report.ranks - 1, rows / 22, 1))) context.fillText(count(rank), box.left - 6, stream.rows.top + (rank + 0.5) * pitch);
  drawAxis(context, box, stream.view.lo, stream.view.hi, count, 1);
  return stream.starts.length;
}

function drawDocuments(context, {view, borders, lengths, box, rows}) {
  const x = (token) => box.left + ((token - view.lo) / (view.hi - view.lo)) * box.width;
  const tones = dark() ? ["#3b4552", "#566273"] : ["#c9d1da", "#aab5c1"];
  let drawn = -1e9;
  for (let document = Math.max(0, lastAtMost(borders, view.lo)); document < lengths.length && borders[document] < view.hi; document++) {
    const [from, to] = [Math.max(box.left, x(borders[document])), Math.min(box.left + box.width, x(borders[document + 1]))];
    if (to - from < 0.5 && from - drawn < 0.5) continue;
    drawn = from;
    context.fillStyle = tones[document % 2];
    context.fillRect(from, DOCUMENTS.top, Math.max(0.5, to - from), DOCUMENTS.height);
    if (to - from > 3 && from > box.left) {
      context.fillStyle = css("--soft");
      context.globalAlpha = 0.45;
      context.fillRect(from - 0.5, DOCUMENTS.top, 1, rows.top + rows.height);
      context.globalAlpha = 1;
    }
    if (to - from < 64) continue;
    context.fillStyle = css("--ink");
    context.textAlign = "center";
    const long = `document ${count(document)}: ${count(lengths[document])}`;
    const text = [long, count(document)].find((each) => context.measureText(each).width < to - from - 8);
    if (text) context.fillText(text, (from + to) / 2, DOCUMENTS.top + DOCUMENTS.height / 2 + 1);
  }
}

function rankWords() {
  return [...Array(report.ranks).keys()].map((rank) => word(rankColour(rank)));
}

// Each column of pixels has the colour of the rank that holds the token in its middle.
function paintBand(on, {view, starts, ends, ranks, chosen, box}) {
  const image = imageOver(on, {left: box.left, top: BAND.top, width: box.width, height: BAND.height});
  const colours = rankWords();
  const faint = word(channels(css("--faint")));
  let at = Math.max(0, lastAtMost(starts, view.lo));
  for (let x = 0; x < image.width; x++) {
    const token = view.lo + ((x + 0.5) / image.width) * (view.hi - view.lo);
    while (at + 1 < starts.length && starts[at + 1] <= token) at++;
    const isHeld = at < starts.length && starts[at] <= token && token < ends[at];
    const colour = !isHeld || (chosen !== null && ranks[at] !== chosen) ? faint : colours[ranks[at]];
    for (let place = x; place < image.words.length; place += image.width) image.words[place] = colour;
  }
  image.done();
}

// A fragment is at least one pixel wide and high, so that none vanishes.
function paintRows(on, {view, starts, ends, ranks, chosen, rows}) {
  const image = imageOver(on, rows);
  image.words.fill(word(channels(css("--card"))));
  const colours = rankWords();
  const [scale, pitch] = [image.width / (view.hi - view.lo), image.height / Math.max(1, report.ranks)];
  for (let at = Math.max(0, lastAtMost(starts, view.lo)); at < starts.length && starts[at] < view.hi; at++) {
    if (ends[at] <= view.lo || (chosen !== null && ranks[at] !== chosen)) continue;
    const from = Math.min(image.width - 1, Math.max(0, Math.floor((starts[at] - view.lo) * scale)));
    const to = Math.min(image.width, Math.max(from + 1, Math.round((ends[at] - view.lo) * scale)));
    const top = Math.min(image.height - 1, Math.floor(ranks[at] * pitch));
    const bottom = Math.max(top + 1, Math.floor((ranks[at] + 1) * pitch) - (pitch > 5 ? 1 : 0));
    for (let y = top; y < bottom; y++) image.words.fill(colours[ranks[at]], y * image.width + from, y * image.width + to);
  }
  image.done();
}

function tokenAt({view, box}, x) {
  return view.lo + ((x - box.left) / box.width) * (view.hi - view.lo);
}

function isInside(box, x, y) {
  return x >= box.left && x < box.left + box.width && y >= box.top && y < box.top + box.height;
}

function fragmentAt(stream, x, y) {
  if (!isInside(stream.box, x, y)) return null;
  const token = tokenAt(stream, x);
  const at = lastAtMost(stream.starts, token);
  return at >= 0 && token < stream.ends[at] ? at : null;
}

function streamWords(stream, x, y) {
  if (!isInside(stream.box, x, y)) return "";
  const {borders, lengths, starts, ends, ranks} = stream;
  const token = Math.min(stream.total - 1, Math.floor(tokenAt(stream, x)));
  const document = Math.max(0, lastAtMost(borders, token));
  const lines = [`token ${count(token)} of the stream`, `document ${count(document)}: token ${count(token - borders[document])} of ${count(lengths[document])}`];
  const at = fragmentAt(stream, x, y);
  if (at === null) return [...lines, "no rank holds it"].join("\n");
  return [...lines, `rank ${count(ranks[at])}${onHost(ranks[at])} holds ${count(starts[at])} to ${count(ends[at])}: ${plural(ends[at] - starts[at], "token")}`].join("\n");
}
