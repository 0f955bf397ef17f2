// Tables that a screen reader reads and that a click on a heading sorts.

// columns: [{name, of: (row) => a number, a text or undefined, show: (value, row) => text or element, text: is it text?, long, head}]
// classOf: (row) => the class of a row
function sortable(caption, columns, rows, {classOf = () => null} = {}) {
  const body = element("tbody");
  const headings = columns.map((column) => {
    const sort = button(column.name, () => by(column, heading));
    const heading = element("th", {scope: "col", class: column.text ? "text" : null}, sort);
    return heading;
  });
  const fill = (sorted) => body.replaceChildren(...sorted.map((row) => element("tr", {class: classOf(row)}, ...columns.map((column) => cell(column, row)))));
  function by(column, heading) {
    const isRising = heading.getAttribute("aria-sort") !== "ascending";
    for (const each of headings) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", isRising ? "ascending" : "descending");
    for (const each of headings) each.firstChild.textContent = columns[headings.indexOf(each)].name;
    heading.firstChild.textContent = `${column.name} ${isRising ? "▲" : "▼"}`;
    fill([...rows].sort((one, other) => compare(column.of(one), column.of(other), isRising)));
  }
  fill(rows);
  const table = element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...headings)), body);
  return element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption}, table);
}

function cell(column, row) {
  const value = column.of(row);
  const shown = value === undefined || value === "" ? "–" : column.show ? column.show(value, row) : String(value);
  if (column.head) return element("th", {scope: "row", class: column.long ? "long" : null}, shown);
  return element("td", {class: [column.text ? "text" : "", column.long ? "long" : ""].join(" ").trim() || null}, shown);
}

// What is not known stands last, whichever way the rest is sorted.
function compare(one, other, isRising) {
  if (one === undefined || other === undefined) return (one === undefined) - (other === undefined);
  const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", {numeric: true});
  return isRising ? order : -order;
}
