// Who sends how much to whom: one canvas, colours by the logarithm of the amount.

function buildTraffic(parent) {
  const {size, unit} = report.traffic;
  const matrix = readMatrix();
  const totals = totalsOf(matrix, size);
  const map = {matrix, size, unit, ...totals, views: {x: new View(0, size, Math.min(4, size)), y: new View(0, size, Math.min(4, size))}};
  parent.append(element("p", {}, trafficWords(map)));
  const scale = element("div", {class: "picture"});
  const picture = element("div", {class: "picture"});
  const canvas = element("canvas");
  picture.append(canvas);
  const draw = () => { drawScale(scale, map); return drawTraffic(canvas, map); };
  const buttons = movable(canvas, {
    views: map.views,
    box: () => map.box,
    redraw: draw,
    hover: (x, y) => cellWords(map, x, y),
    told: () => `Senders ${count(map.views.y.lo)} to ${count(map.views.y.hi)}, receivers ${count(map.views.x.lo)} to ${count(map.views.x.hi)}.`,
  });
  canvas.setAttribute("aria-label", `${trafficWords(map)} Arrow keys move, plus and minus zoom. The table of ranks has what each sends and receives.`);
  parent.append(element("div", {class: "controls"}, ...buttons), scale, picture);
  const borders = hostBorders().length ? " Lines divide hosts." : "";
  parent.append(element("p", {class: "said"}, `A row sends to a column.${borders} Where several cells share a pixel, the largest is shown.`));
  return draw;
}

function readMatrix() {
  const {size, places, values} = report.traffic;
  if (!places) return numbers(values);
  const matrix = new Float64Array(size * size);
  const amounts = numbers(values);
  numbers(places).forEach((place, at) => { matrix[place] = amounts[at]; });
  return matrix;
}

function totalsOf(matrix, size) {
  const [sent, received] = [new Float64Array(size), new Float64Array(size)];
  let [least, most, between, total] = [Infinity, 0, 0, 0];
  for (let at = 0; at < matrix.length; at++) {
    const value = matrix[at];
    const [from, to] = [Math.floor(at / size), at % size];
    if (value === 0 || from === to) continue; // what a rank keeps does not travel
    sent[from] += value;
    received[to] += value;
    total += value;
    if (hostOf(from) !== hostOf(to)) between += value;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return {sent, received, total, between, least, most};
}

function trafficWords({sent, received, total, between, unit}) {
  if (total === 0) return "Nothing travels.";
  const largest = (list) => list.indexOf(list.reduce((one, other) => Math.max(one, other), 0));
  const [sender, receiver] = [largest(sent), largest(received)];
  const hosts = hostBorders().length ? `, ${percent(between / total)} of it between hosts` : "";
  return `${amount(total, unit)} travel in all${hosts}. Rank ${count(sender)} sends most, ${amount(sent[sender], unit)}; rank ${count(receiver)} receives most, ${amount(received[receiver], unit)}.`;
}

function shareOf({least, most}, value) {
  return most > least ? Math.log(value / least) / Math.log(most / least) : 1;
}

function drawScale(picture, {least, most, total, unit}) {
  if (total === 0) return picture.replaceChildren();
  const width = Math.min(420, picture.clientWidth || 420);
  const steps = 42;
  const svg = shape("svg", {width, height: 34, role: "img", "aria-label": `Colours from ${amount(least, unit)} to ${amount(most, unit)}, logarithmic`});
  for (let at = 0; at < steps; at++) svg.append(shape("rect", {x: (at * width) / steps, y: 0, width: width / steps + 0.5, height: 12, fill: rgb(heat(0.1 + (0.9 * at) / (steps - 1)))}));
  const marks = most > least ? [[0, "start", least], [0.5, "middle", Math.sqrt(least * most)], [1, "end", most]] : [[0, "start", most]];
  for (const [share, anchor, value] of marks) svg.append(shape("text", {class: "soft", x: share * width, y: 28, "text-anchor": anchor}, amount(value, unit)));
  picture.replaceChildren(svg);
}

function drawTraffic(canvas, map) {
  const side = Math.min(canvas.parentElement.clientWidth - 64, 640);
  const on = fitted(canvas, side + 44);
  const {context} = on;
  map.box = {left: 56, top: 36, width: side, height: side};
  paintCells(on, map);
  drawRankTicks(context, map);
  drawHosts(context, map);
  if (side / (map.views.x.hi - map.views.x.lo) >= 52) drawAmounts(context, map);
  return map.size * map.size;
}

// Every pixel has the largest of the amounts that it covers.
function paintCells(on, {matrix, size, views, box, least, most}) {
  const image = imageOver(on, box);
  const table = Uint32Array.from({length: 256}, (_, at) => word(heat(0.1 + (0.9 * at) / 255)));
  const empty = word(channels(css("--faint")));
  const spans = (view, pixels) => Array.from({length: pixels}, (_, at) => {
    const from = Math.min(size - 1, Math.floor(view.lo + (at * (view.hi - view.lo)) / pixels));
    return [from, Math.min(size, Math.max(from + 1, Math.floor(view.lo + ((at + 1) * (view.hi - view.lo)) / pixels)))];
  });
  const [columns, rows] = [spans(views.x, image.width), spans(views.y, image.height)];
  const scale = most > least ? 255 / Math.log(most / least) : 0;
  for (let y = 0; y < image.height; y++) {
    const [top, bottom] = rows[y];
    if (y > 0 && bottom === top + 1 && rows[y - 1][0] === top) {
      image.words.copyWithin(y * image.width, (y - 1) * image.width, y * image.width);
      continue;
    }
    for (let x = 0; x < image.width; x++) {
      let largest = 0;
      for (let row = top; row < bottom; row++) for (let column = columns[x][0]; column < columns[x][1]; column++) {
        const value = row === column ? 0 : matrix[row * size + column];
        if (value > largest) largest = value;
      }
      image.words[y * image.width + x] = largest === 0 ? empty : table[scale ? Math.min(255, Math.max(0, Math.round(Math.log(largest / least) * scale))) : 255];
    }
  }
  image.done();
}

function drawRankTicks(context, {views, box}) {
  context.fillStyle = css("--soft");
  const at = (view, rank, from, span) => from + ((rank + 0.5 - view.lo) / (view.hi - view.lo)) * span;
  const list = (view) => ticks(Math.ceil(view.lo), Math.ceil(view.hi) - 1, 12, 1).filter((rank) => rank + 0.5 >= view.lo && rank + 0.5 <= view.hi);
  context.textAlign = "center";
  for (const rank of list(views.x)) context.fillText(count(rank), at(views.x, rank, box.left, box.width), box.top - 9);
  context.fillText("receiving rank", box.left + box.width / 2, 9);
  context.textAlign = "right";
  for (const rank of list(views.y)) context.fillText(count(rank), box.left - 7, at(views.y, rank, box.top, box.height));
  context.save();
  context.translate(9, box.top + box.height / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText("sending rank", 0, 0);
  context.restore();
}

function drawHosts(context, {views, box}) {
  context.strokeStyle = css("--ink");
  context.lineWidth = 1;
  context.strokeRect(box.left - 0.5, box.top - 0.5, box.width + 1, box.height + 1);
  const borders = hostBorders();
  const near = (box.width / (views.x.hi - views.x.lo)) * (report.ranks / (borders.length + 1));
  context.globalAlpha = near > 24 ? 0.8 : near > 8 ? 0.35 : 0.1;
  context.beginPath();
  for (const border of borders) {
    const x = box.left + ((border - views.x.lo) / (views.x.hi - views.x.lo)) * box.width;
    const y = box.top + ((border - views.y.lo) / (views.y.hi - views.y.lo)) * box.height;
    if (x > box.left && x < box.left + box.width) { context.moveTo(x, box.top); context.lineTo(x, box.top + box.height); }
    if (y > box.top && y < box.top + box.height) { context.moveTo(box.left, y); context.lineTo(box.left + box.width, y); }
  }
  context.stroke();
  context.globalAlpha = 1;
}

// Amounts in the cells, where these are large enough to hold them.
function drawAmounts(context, map) {
  const {views, box, matrix, size, unit} = map;
  const pitch = box.width / (views.x.hi - views.x.lo);
  context.textAlign = "center";
  for (let row = Math.floor(views.y.lo); row < Math.ceil(views.y.hi); row++) for (let column = Math.floor(views.x.lo); column < Math.ceil(views.x.hi); column++) {
    const value = matrix[row * size + column];
    if (!value || row === column) continue;
    const [x, y] = [box.left + (column + 0.5 - views.x.lo) * pitch, box.top + (row + 0.5 - views.y.lo) * pitch];
    const text = amount(value, unit);
    if (!isInside(box, x, y) || context.measureText(text).width > pitch - 4) continue;
    context.fillStyle = inkOn(heat(0.1 + 0.9 * shareOf(map, value)));
    context.fillText(text, x, y);
  }
}

function cellWords({views, box, matrix, size, unit}, x, y) {
  if (!isInside(box, x, y)) return "";
  const column = Math.min(size - 1, Math.floor(views.x.lo + ((x - box.left) / box.width) * (views.x.hi - views.x.lo)));
  const row = Math.min(size - 1, Math.floor(views.y.lo + ((y - box.top) / box.height) * (views.y.hi - views.y.lo)));
  if (row === column) return `rank ${count(row)}${onHost(row)}\nwhat it keeps does not travel`;
  const value = matrix[row * size + column];
  const exact = unit === "bytes" && value >= 1024 ? ` (${count(value)} bytes)` : "";
  return `rank ${count(row)}${onHost(row)} sends\nto rank ${count(column)}${onHost(column)}:\n${amount(value, unit)}${exact}`;
}
