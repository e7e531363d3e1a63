// The table of a transformer: a row for each block, a column for each kind of layer, and a cell for each head.

const MANY_HEADS = 16; // cells of more heads have no room for numbers

function formatCompact(count) {
  for (const [size, unit] of [
    [1, ""],
    [1e3, "k"],
    [1e6, "M"],
  ]) {
    if (count < 999.5 * size) return (unit && count / size < 9.95 ? (count / size).toFixed(1) : Math.round(count / size)) + unit;
  }
  return count.toExponential(1);
}

class BlockGrid {
  constructor(records, table, select) {
    Object.assign(this, { records, table, select });
    const { blocks, columns, attentions } = records.data;
    this.families = [...new Set(attentions.map((one) => one.family))];
    // The widest row decides whether there is room for numbers.
    const heads = blocks.map((_, block) => attentions.reduce((sum, one) => sum + (one.block === block) * one.heads, 0));
    this.many = Math.max(...heads) > MANY_HEADS;
    this.makeHead(columns);
    this.cells = []; // [button, { cell }] or [button, { attention, head }]
    blocks.forEach((name, block) => this.makeRow(name, block));
  }

  makeHead(columns) {
    const groups = element("tr", "", element("th")),
      kinds = element("tr", "", element("th"));
    for (const [i, [family, kind]] of columns.entries()) {
      if (i && columns[i - 1][0] === family) groups.lastChild.colSpan++;
      else groups.append(element("th", family));
      kinds.append(element("th", kind));
    }
    for (const family of this.families) {
      groups.append(element("th", family === "attention" ? "heads" : `heads of ${family}`));
      kinds.append(element("th", this.many ? "from head 0 on" : "real edges of each, from head 0 on"));
    }
    this.table.tHead.append(groups, kinds);
  }

  makeRow(name, block) {
    const { columns, cells, attentions } = this.records.data,
      row = element("tr", "", element("th", name));
    columns.forEach((_, column) => {
      const cell = cells.find((one) => one.block === block && one.column === column);
      row.append(element("td", "", ...(cell ? [this.makeButton({ cell })] : [])));
    });
    for (const family of this.families) {
      const attention = attentions.find((one) => one.block === block && one.family === family),
        box = element("div");
      box.className = this.many ? "heads many" : "heads";
      for (let head = 0; attention && head < attention.heads; head++) box.append(this.makeButton({ attention, head }));
      row.append(element("td", "", box));
    }
    this.table.tBodies[0].append(row);
  }

  makeButton(what) {
    const button = element("button");
    button.type = "button";
    button.addEventListener("click", () => this.select(what));
    this.cells.push([button, what]);
    return button;
  }

  // Shows a record. Returns the density of the densest layer, which has the strongest colour.
  show(at, selected, colour) {
    const { records } = this,
      densest = Math.max(...records.data.cells.map((cell) => records.density(cell, at)), 1e-9);
    const most = Math.max(...records.data.attentions.flatMap((one) => records.headTotals(one, at)), 1);
    for (const [button, what] of this.cells) {
      const missing = what.cell ? "" : what.attention.missing[at][what.head],
        value = what.cell ? records.density(what.cell, at) : records.headEdges(what.attention, what.head, at);
      const share = missing ? 0 : value / (what.cell ? densest : most);
      button.textContent = what.cell ? formatTick(value) : missing ? deadText(missing) : formatCompact(value);
      button.title = records.describe(what, at);
      const shade = mixColours(colour.ground, colour.positive, 0.9 * share);
      button.classList.toggle("strong", !missing && prefersGround(shade, colour));
      button.classList.toggle("dead", Boolean(missing));
      button.classList.toggle("selected", sameSelection(what, selected));
      button.style.background = missing ? "" : `rgb(${shade.join(" ")})`;
    }
    return densest;
  }
}

// Whether text in the colour of the background is easier to read on a shade than text in the usual colour.
function prefersGround(shade, colour) {
  const contrast = (text) => {
    const [low, high] = [luminance(shade), luminance(mixColours(text, text, 0))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  return contrast(colour.ground) > contrast(colour.text);
}

const deadText = (missing) => (missing.split(", ").length < 3 ? `no ${missing}` : "dead");
const sameSelection = (one, other) =>
  Boolean(other) && one.cell === other.cell && one.attention === other.attention && one.head === other.head;
