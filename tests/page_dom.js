// Runs a page's script with as much of a DOM as it asks for: `node page_dom.js PAGE.html` prints what it drew, as JSON.

const fs = require("fs");

const html = fs.readFileSync(process.argv[2], "utf8");
const [, report] = /<script type="application\/json" id="report">([\s\S]*?)<\/script>/.exec(html);
const [, script] = [...html.matchAll(/<script>([\s\S]*?)<\/script>/g)].pop();

const context = new Proxy({}, {
  get: (kept, name) => ({
    measureText: (text) => ({width: 7 * text.length}),
    createImageData: (width, height) => ({data: new Uint8ClampedArray(width * height * 4)}),
  })[name] ?? (name in kept ? kept[name] : () => {}),
  set: (kept, name, value) => { kept[name] = value; return true; },
});

class Element {
  constructor(tag, text = "") {
    Object.assign(this, {tag, text, children: [], attributes: {}, dataset: {}, style: {}, classList: {add() {}}, clientWidth: 1000});
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  append(...children) {
    for (const child of children) {
      const made = child instanceof Element ? child : new Element("#text", String(child));
      made.parentElement = this;
      this.children.push(made);
    }
  }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  get firstChild() { return this.children[0]; }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = [new Element("#text", text)]; }
  addEventListener() {}
  getContext() { return context; }
  getBoundingClientRect() { return {left: 0, top: 0, width: 10, height: 10}; }
  querySelectorAll(tag) { return this.all(tag); }
  all(tag) { return [...(this.tag === tag ? [this] : []), ...this.children.flatMap((child) => child.all(tag))]; }
}

const places = {report: new Element("script", report)};
for (const name of ["main", "contents", "theme", "tip", "said"]) places[name] = new Element(name);
Object.assign(globalThis, {
  document: {
    getElementById: (name) => places[name],
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
    documentElement: new Element("html"),
    body: new Element("body"),
    querySelectorAll: () => [],
  },
  getComputedStyle: () => ({getPropertyValue: () => "#ffffff", fontFamily: "sans"}),
  matchMedia: () => ({matches: false, addEventListener() {}}),
  addEventListener() {},
  innerWidth: 1200,
  innerHeight: 800,
  devicePixelRatio: 1,
  window: globalThis,
});
new Function(script)();

const cellsOf = (table) => table.all("tr").map((row) => row.children.map((cell) => cell.textContent));
console.log(JSON.stringify(places.main.children.map((section) => ({
  id: section.attributes.id,
  drawn: section.dataset.drawn,
  failed: section.dataset.failed ?? null,
  text: section.textContent,
  tables: section.all("table").map(cellsOf),
  paths: section.all("path").map((path) => path.attributes.d),
}))));
