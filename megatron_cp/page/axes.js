// Canvases that keep their sharpness, axes, and views that the wheel, the pointer and the keyboard move.

// Even steps of 1, 2 or 5 times a power of ten from `lo` to `hi`, at most `most` of them.
function ticks(lo, hi, most, least = 0) {
  if (!(hi > lo)) return [lo];
  const rough = Math.max((hi - lo) / Math.max(1, most), least);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999999);
  const found = [];
  for (let number = Math.ceil(lo / step - 1e-9) + 0; number * step <= hi * (1 + 1e-12); number++) found.push(number * step + 0);
  return found;
}

// A canvas of whole device pixels, with a context that counts CSS pixels from its corner.
function fitted(canvas, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  const width = Math.max(120, canvas.parentElement.clientWidth);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return {context, width, height, ratio};
}

// An image of whole device pixels over a box of a canvas, painted by words. `done` puts it there.
function imageOver({context, ratio}, box) {
  const width = Math.max(1, Math.round(box.width * ratio));
  const height = Math.max(1, Math.round(box.height * ratio));
  const image = context.createImageData(width, height);
  const words = new Uint32Array(image.data.buffer);
  return {width, height, words, done: () => context.putImageData(image, Math.round(box.left * ratio), Math.round(box.top * ratio))};
}

// The ticks of a horizontal axis below a box, with the words that `name` gives for a value.
function drawAxis(context, box, lo, hi, name, least = 0) {
  const place = (value) => box.left + ((value - lo) / (hi - lo || 1)) * box.width;
  const found = ticks(lo, hi, box.width / 110, least);
  const step = found.length > 1 ? found[1] - found[0] : hi - lo;
  context.fillStyle = css("--soft");
  context.strokeStyle = css("--soft");
  context.lineWidth = 1;
  for (const value of found) {
    const x = place(value);
    context.beginPath();
    context.moveTo(x, box.top + box.height);
    context.lineTo(x, box.top + box.height + 5);
    context.stroke();
    const text = name(value, step);
    const half = context.measureText(text).width / 2;
    context.textAlign = "left";
    context.fillText(text, Math.min(box.left + box.width - 2 * half, Math.max(box.left, x - half)), box.top + box.height + 14);
  }
}

// A part of a whole range that is shown: zoomed about a place, moved, and never outside the whole.
class View {
  constructor(lo, hi, least) {
    Object.assign(this, {whole: [lo, hi], least: Math.min(least, hi - lo), lo, hi});
  }
  get isWhole() {
    return this.lo <= this.whole[0] && this.hi >= this.whole[1];
  }
  zoom(factor, share) {
    const span = Math.min(this.whole[1] - this.whole[0], Math.max(this.least, (this.hi - this.lo) * factor));
    this.show(this.lo + (this.hi - this.lo - span) * share, span);
  }
  move(share) {
    this.show(this.lo + (this.hi - this.lo) * share, this.hi - this.lo);
  }
  show(lo, span) {
    this.lo = Math.min(Math.max(lo, this.whole[0]), this.whole[1] - span);
    this.hi = this.lo + span;
  }
  reset() {
    [this.lo, this.hi] = this.whole;
  }
}

let lastScroll = -1e9; // a page that scrolls under the pointer goes on scrolling: the wheel does not start to zoom
addEventListener("scroll", () => { lastScroll = performance.now(); }, {passive: true});

const KEYS = {ArrowLeft: ["x", -0.15], ArrowRight: ["x", 0.15], ArrowUp: ["y", -0.15], ArrowDown: ["y", 0.15]};

// Moves the views of a canvas.
//   views: {x: View} or {x: View, y: View}
//   box: () => the part of the canvas that shows them
//   redraw: () => paints; called once a frame at most
//   hover: (x, y) => words for the place, in CSS pixels of the canvas, or ""
//   click: (x, y) => void
//   told: () => words for the range that is shown
function movable(canvas, {views, box, redraw, hover, click = () => {}, told}) {
  let waiting = false;
  const repaint = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; redraw(); });
  };
  const shares = (x, y) => ({
    x: Math.min(1, Math.max(0, (x - box().left) / box().width)),
    y: Math.min(1, Math.max(0, (y - box().top) / box().height)),
  });
  const zoom = (factor, at = {x: 0.5, y: 0.5}) => {
    for (const axis of Object.keys(views)) views[axis].zoom(factor, at[axis]);
    repaint();
  };
  const reset = () => {
    for (const view of Object.values(views)) view.reset();
    repaint();
  };
  canvas.addEventListener("wheel", (event) => {
    const isWhole = Object.values(views).every((view) => view.isWhole);
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (performance.now() - lastScroll < 300 || (isWhole && (isSideways || event.deltaY >= 0))) return;
    event.preventDefault();
    showTip("");
    if (isSideways) views.x.move(event.deltaX / box().width);
    else zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * (event.deltaMode ? 0.05 : 0.0022)))), shares(event.offsetX, event.offsetY));
    repaint();
  }, {passive: false});
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) held = {x: event.offsetX, y: event.offsetY, moved: false};
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return showTip(hover(event.offsetX, event.offsetY), event);
    const by = {x: event.offsetX - held.x, y: event.offsetY - held.y};
    if (!held.moved && Math.hypot(by.x, by.y) < 4) return;
    if (!held.moved) canvas.setPointerCapture(event.pointerId);
    showTip("");
    views.x.move(-by.x / box().width);
    views.y?.move(-by.y / box().height);
    held = {x: event.offsetX, y: event.offsetY, moved: true};
    repaint();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held !== null && !held.moved) click(event.offsetX, event.offsetY);
    held = null;
  });
  for (const name of ["pointerleave", "pointercancel"]) canvas.addEventListener(name, () => { held = null; showTip(""); });
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [axis, share] = KEYS[event.key] ?? [];
    if (views[axis]) { views[axis].move(share); repaint(); }
    else if (event.key === "+" || event.key === "=") zoom(1 / 1.5);
    else if (event.key === "-") zoom(1.5);
    else if (event.key === "0" || event.key === "Escape") reset();
    else return;
    event.preventDefault();
    say(told());
  });
  canvas.setAttribute("tabindex", "0");
  canvas.setAttribute("role", "img");
  canvas.parentElement.classList.add("moves");
  return [
    button("Zoom in", () => { zoom(1 / 1.8); say(told()); }),
    button("Zoom out", () => { zoom(1.8); say(told()); }),
    button("Show all", () => { reset(); say(told()); }),
  ];
}
