// Who computes what: the mask, keys to the right and queries down, each tile in the colour of the rank that computes it.

const SHAPE = 6; // numbers of a shape: its queries, the keys at its first query, the keys at its last

function buildTiles(parent) {
  const pictures = report.tiles.map((each) => ({...each, shapes: numbers(each.shapes), ranks: numbers(each.ranks)}));
  const chosen = {rank: null};
  const number = element("input", {type: "number", min: 0, max: report.ranks - 1, placeholder: "all"});
  const controls = element("div", {class: "controls"});
  const pair = element("div", {class: "pair"});
  parent.append(controls, rankLegend(), pair);
  const draw = () => pictures.reduce((sum, picture) => sum + drawTiles(picture, chosen.rank), 0);
  const choose = (rank) => {
    chosen.rank = rank === chosen.rank ? null : rank;
    number.value = chosen.rank ?? "";
    draw();
  };
  number.addEventListener("input", () => {
    const rank = number.value === "" ? null : Number(number.value);
    chosen.rank = Number.isInteger(rank) && rank >= 0 && rank < report.ranks ? rank : null;
    draw();
  });
  // Pictures of one mask show the same part of it.
  const views = new Map();
  for (const picture of pictures) {
    const {queries, keys} = picture;
    const view = (tokens) => new View(0, Math.max(1, tokens), Math.min(16, Math.max(1, tokens)));
    const of = `${queries} ${keys}`;
    const isFirst = !views.has(of);
    if (isFirst) views.set(of, {x: view(keys), y: view(queries)});
    picture.views = views.get(of);
    const buttons = addTiles(pair, picture, draw, choose);
    if (isFirst) controls.append(...buttons);
  }
  controls.append(element("label", {}, "Only rank", number));
  parent.append(element("p", {class: "said"}, "The wheel zooms, dragging moves, a click shows one rank alone. Where nothing is painted, no query sees a key. A tile has at least a pixel."));
  return draw;
}

function addTiles(parent, picture, redraw, choose) {
  const canvas = element("canvas");
  const frame = element("div", {class: "picture"}, canvas);
  parent.append(element("div", {}, element("h3", {}, picture.name), picture.text ? element("p", {}, picture.text) : null, frame));
  picture.canvas = canvas;
  const {x, y} = picture.views;
  const buttons = movable(canvas, {
    views: picture.views,
    box: () => picture.box,
    redraw,
    hover: (left, top) => tileWords(picture, left, top),
    click: (left, top) => {
      const found = tileAt(picture, left, top);
      if (found !== null) choose(picture.ranks[found]);
    },
    told: () => `Queries ${count(y.lo)} to ${count(y.hi)}, keys ${count(x.lo)} to ${count(x.hi)}.`,
  });
  canvas.setAttribute("aria-label", `${picture.name}: which rank computes which part of a mask of ${plural(picture.queries, "query token")} and ${plural(picture.keys, "key token")}. Arrow keys move, plus and minus zoom.`);
  return buttons;
}

// Whether one of the neighbouring ranks that compute a tile together is the one that the reader chose.
const isOf = (first, group, rank) => rank === null || (first <= rank && rank < first + group);

function drawTiles(picture, rank) {
  const {canvas, views} = picture;
  const side = Math.max(80, Math.min(canvas.parentElement.clientWidth - 82, 560));
  const on = fitted(canvas, side + 48);
  const {context} = on;
  picture.box = {left: 74, top: 6, width: side, height: side};
  paintTiles(on, picture, rank);
  const {box} = picture;
  context.strokeStyle = css("--line");
  context.lineWidth = 1;
  context.strokeRect(box.left - 0.5, box.top - 0.5, box.width + 1, box.height + 1);
  drawAxis(context, box, views.x.lo, views.x.hi, count, 1);
  context.textAlign = "right";
  for (const query of ticks(views.y.lo, views.y.hi, box.height / 60, 1)) {
    context.fillText(count(query), box.left - 6, box.top + ((query - views.y.lo) / (views.y.hi - views.y.lo)) * box.height);
  }
  context.textAlign = "center";
  context.fillText("key", box.left + box.width / 2, box.top + box.height + 34);
  context.save();
  context.translate(8, box.top + box.height / 2);
  context.rotate(-Math.PI / 2);
  context.fillText("query", 0, 0);
  context.restore();
  return picture.ranks.length;
}

// The keys of a shape at one of its queries; between queries, what lies between.
function keysAt(shapes, at, query) {
  const [start, end, first, firstEnd, last, lastEnd] = shapes.subarray(at * SHAPE, (at + 1) * SHAPE);
  const share = end - start > 1 ? Math.min(1, Math.max(0, (query - start) / (end - 1 - start))) : 0;
  return [first + (last - first) * share, firstEnd + (lastEnd - firstEnd) * share];
}

function paintTiles(on, {shapes, ranks, group, views, box}, chosen) {
  const image = imageOver(on, box);
  const {width, height, words} = image;
  words.fill(word(channels(css("--faint"))));
  const colours = rankWords();
  const [across, down] = [width / (views.x.hi - views.x.lo), height / (views.y.hi - views.y.lo)];
  for (let at = 0; at < ranks.length; at++) {
    const [start, end] = [shapes[at * SHAPE], shapes[at * SHAPE + 1]];
    if (end <= views.y.lo || start >= views.y.hi || !isOf(ranks[at], group, chosen)) continue;
    const top = Math.min(height - 1, Math.round((start - views.y.lo) * down));
    const bottom = Math.max(top + 1, Math.round((end - views.y.lo) * down));
    for (let row = Math.max(0, top); row < Math.min(height, bottom); row++) {
      const [left, right] = keysAt(shapes, at, views.y.lo + (row + 0.5) / down - 0.5);
      if (right <= left || right <= views.x.lo || left >= views.x.hi) continue;
      const from = Math.min(width - 1, Math.round((left - views.x.lo) * across));
      const to = Math.max(from + 1, Math.round((right - views.x.lo) * across));
      words.fill(colours[ranks[at]], row * width + Math.max(0, from), row * width + Math.min(width, to));
    }
  }
  image.done();
}

function placeOf({views, box}, left, top) {
  if (!isInside(box, left, top)) return null;
  const token = (view, share) => Math.floor(view.lo + share * (view.hi - view.lo));
  return {key: token(views.x, (left - box.left) / box.width), query: token(views.y, (top - box.top) / box.height)};
}

function tileAt(picture, left, top) {
  const place = placeOf(picture, left, top);
  if (place === null) return null;
  const {shapes, ranks} = picture;
  for (let at = 0; at < ranks.length; at++) {
    if (place.query < shapes[at * SHAPE] || place.query >= shapes[at * SHAPE + 1]) continue;
    const [from, to] = keysAt(shapes, at, place.query).map(Math.round);
    if (place.key >= from && place.key < to) return at;
  }
  return null;
}

function tileWords(picture, left, top) {
  const place = placeOf(picture, left, top);
  if (place === null) return "";
  const where = `query ${count(place.query)}, key ${count(place.key)}`;
  const found = tileAt(picture, left, top);
  if (found === null) return `${where}\nnot visible`;
  const [first, group] = [picture.ranks[found], picture.group];
  const [start, end] = picture.shapes.subarray(found * SHAPE, found * SHAPE + 2);
  const who = group > 1 ? `ranks ${count(first)} to ${count(first + group - 1)}, each for its heads` : `rank ${count(first)}${onHost(first)}`;
  return `${where}\ncomputed by ${who}\nin a piece of the queries ${count(start)} to ${count(end - 1)}`;
}
