// The report as typed arrays, words for numbers, colours, and elements. Everything that a user wrote becomes a text node
// or the value of an attribute: nothing here parses HTML.

const ARRAYS = {u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array};

// A column that `columns.packed` made. The bytes are little-endian, as on every machine that has a browser today.
function numbers([type, text]) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = characters.charCodeAt(at);
  return new ARRAYS[type](bytes.buffer);
}

const report = JSON.parse(document.getElementById("report").textContent);
const dark = () => document.documentElement.dataset.theme === "dark";

// -- elements ---------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(text, act, attributes = {}) {
  return element("button", {type: "button", onclick: act, ...attributes}, text);
}

// -- words for numbers ------------------------------------------------------------------------------------------------

function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

// Three significant digits or more: 0.0123, 1.23, 12.3, 1,234.
function decimal(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(2);
  const digits = Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(size))));
  return value.toLocaleString("en-US", {maximumFractionDigits: digits, minimumFractionDigits: size < 1000 ? digits : 0});
}

function percent(share) {
  return `${decimal(100 * share)} %`;
}

const BYTE_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(value) {
  const step = value < 1024 ? 0 : Math.min(BYTE_UNITS.length - 1, Math.floor(Math.log2(value) / 10));
  return step === 0 ? plural(value, "byte") : `${decimal(value / 1024 ** step)} ${BYTE_UNITS[step]}`;
}

function amount(value, unit) {
  return unit === "bytes" ? bytes(value) : `${decimal(value)} ${unit}`.trim();
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size >= 1) return `${decimal(seconds)} s`;
  if (size >= 1e-3) return `${decimal(seconds * 1e3)} ms`;
  return size === 0 ? "0 s" : size >= 1e-6 ? `${decimal(seconds * 1e6)} µs` : `${decimal(seconds * 1e9)} ns`;
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// -- colours ----------------------------------------------------------------------------------------------------------

// Okabe and Ito's colours, which colour-blind people tell apart, without the yellow that a white page hides.
const DISTINCT = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8fd6", "#7f7f7f"];
// Viridis at nine places: its lightness rises evenly, so that it also reads in grey.
const RAMP = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

function along(share) {
  const place = Math.min(1, Math.max(0, share)) * (RAMP.length - 1);
  const at = Math.min(RAMP.length - 2, Math.floor(place));
  return RAMP[at].map((from, channel) => Math.round(from + (RAMP[at + 1][channel] - from) * (place - at)));
}

// For amounts: the further from the background, the more.
function heat(share) {
  return along(dark() ? 0.08 + 0.92 * share : 1 - 0.96 * share);
}

// For shares of time: from the empty row's colour, so that an idle cell looks as an idle row does.
function busyness(share) {
  const [idle, busy] = [channels(css("--faint")), dark() ? [150, 210, 255] : [0, 62, 120]];
  return idle.map((from, channel) => Math.round(from + (busy[channel] - from) * share));
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function rgb([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

// One pixel of an image as a 32-bit word, little-endian.
function word([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Few ranks have colours that are told apart, many have a ramp: neighbours then look alike, as they should.
function rankColour(rank) {
  if (report.ranks <= DISTINCT.length) return channels(DISTINCT[rank % DISTINCT.length]);
  return along(0.06 + 0.88 * (rank / (report.ranks - 1)));
}

// Black or white, whichever is read better on a colour (W3C's relative luminance, roughly).
function inkOn([red, green, blue]) {
  return 0.2126 * (red / 255) ** 2.2 + 0.7152 * (green / 255) ** 2.2 + 0.0722 * (blue / 255) ** 2.2 > 0.3 ? "#000" : "#fff";
}

function swatch(colour, kind = "box") {
  const inside = {
    box: () => shape("rect", {width: 14, height: 14, rx: 2, fill: colour}),
    thin: () => shape("rect", {y: 5, width: 14, height: 4, fill: colour}),
    line: () => shape("line", {x1: 0, x2: 14, y1: 7, y2: 7, stroke: colour, "stroke-width": 2.5}),
  }[kind]();
  return shape("svg", {width: 14, height: 14, "aria-hidden": true}, inside);
}

function legend(entries) {
  return element("ul", {class: "legend"}, ...entries.map(([colour, text, kind]) => element("li", {}, swatch(colour, kind), text)));
}

// -- hosts ------------------------------------------------------------------------------------------------------------

const hostOf = (rank) => report.hosts?.[rank] ?? "";
const onHost = (rank) => (hostOf(rank) ? ` on ${hostOf(rank)}` : "");

// The ranks, but the first, that are on another host than the rank before.
function hostBorders() {
  const hosts = report.hosts ?? [];
  return hosts.map((_, rank) => rank).filter((rank) => rank > 0 && hosts[rank] !== hosts[rank - 1]);
}

// -- what the pointer is on -------------------------------------------------------------------------------------------

const tip = document.getElementById("tip");

function showTip(text, event) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const {width, height} = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 18 + height > innerHeight ? event.clientY - 12 - height : event.clientY + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

// Gives a shape its words: on hover, on keyboard focus, and to a screen reader.
function explained(made, text) {
  made.setAttribute("tabindex", "0");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", text.replaceAll("\n", ", "));
  made.addEventListener("pointermove", (event) => showTip(text, event));
  made.addEventListener("pointerleave", () => showTip(""));
  made.addEventListener("focus", () => {
    const box = made.getBoundingClientRect();
    if (made.matches(":focus-visible")) showTip(text, {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2});
  });
  made.addEventListener("blur", () => showTip(""));
  return made;
}

function say(text) {
  document.getElementById("said").textContent = text;
}
