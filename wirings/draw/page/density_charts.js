// The density of a transformer's layers over training: a chart for each kind of layer, a line for each block.

const LOWEST_CHART = 130, // of which the lines get 80 px
  NARROWEST_CHART = 120;

class DensityCharts {
  constructor(records, canvas, seekStep) {
    Object.assign(this, { records, canvas, charts: [], rows: 1 });
    if (records.length > 1) {
      window.addEventListener("resize", () => this.arrange()); // not while the canvas is observed: it changes its size
      this.arrange();
    }
    canvas.addEventListener("pointerdown", (event) => {
      const box = canvas.getBoundingClientRect(),
        x = event.clientX - box.left,
        y = event.clientY - box.top;
      const chart = this.charts.find(
        ({ left, right, top, low }) => x >= left - 4 && x <= right + 4 && y >= top - 20 && y <= low + 30,
      );
      const [first, last] = [records.steps[0], records.steps[records.length - 1]];
      if (chart) seekStep(first + ((x - chart.left) / (chart.right - chart.left)) * (last - first));
    });
  }

  // Divides the charts into rows, and makes room for these: the page scrolls if the window is too small.
  arrange() {
    const perRow = Math.max(2, Math.floor(this.canvas.getBoundingClientRect().width / NARROWEST_CHART));
    this.rows = Math.ceil(this.records.data.columns.length / perRow);
    this.canvas.parentElement.style.setProperty("--charts", `${this.rows * LOWEST_CHART}px`);
  }

  // The densities of a cell at all records, in percent.
  values(cell) {
    return cell.real.map((_, at) => this.records.density(cell, at));
  }

  // Draws the charts with a mark at a step; the lines of the selected block are thick.
  draw(colour, step, block) {
    const { width, height } = this.canvas.getBoundingClientRect(),
      key = `${width} ${height} ${colour.ground}`;
    if (this.painted !== key) this.paint(colour, key);
    const fitted = this.picture && fitCanvas(this.canvas);
    if (!fitted) return; // hidden, since there is nothing to play
    const { context } = fitted;
    context.drawImage(this.picture, 0, 0, width, height);
    context.strokeStyle = colour.text;
    for (const { x, y, top, low, cells } of this.charts) {
      const own = cells.find((cell) => cell.block === block);
      if (own) drawLine(context, this.records.steps, this.values(own), x, y, 2.5);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x(step), top);
      context.lineTo(x(step), low);
      context.stroke();
    }
  }

  // The curves do not change while the history plays, so they are painted once.
  paint(colour, key) {
    const fitted = fitCanvas(this.canvas);
    if (!fitted) return;
    const { context, width, height } = fitted,
      { columns, cells } = this.records.data,
      { steps } = this.records,
      { rows } = this,
      perRow = Math.ceil(columns.length / rows);
    const most = 1.05 * cells.reduce((least, cell) => Math.max(least, ...this.values(cell)), 1e-9);
    const numbers = 26, // the first of a row is wider by the numbers at its axis
      wide = (width - numbers) / perRow;
    this.charts = columns.map(([, , title], column) => {
      const first = column % perRow === 0,
        own = cells.filter((cell) => cell.column === column);
      const box = {
        x: (column % perRow) * wide + (first ? 0 : numbers),
        y: (Math.floor(column / perRow) * height) / rows,
        width: wide + (first ? numbers : 0),
        height: height / rows,
      };
      const lines = own.map((cell) => ({ values: this.values(cell), paint: this.paintOf(cell.block, colour) }));
      const labels = { title, yLabel: first ? "density, %" : "", xLabel: wide < 105 || height / rows < 125 ? "" : "optimizer step" };
      return { ...drawChart(context, colour, box, { steps, lines, most, ...labels, yNumbers: first }), cells: own };
    });
    this.picture = Object.assign(document.createElement("canvas"), {
      width: this.canvas.width,
      height: this.canvas.height,
    });
    this.picture.getContext("2d").drawImage(this.canvas, 0, 0);
    this.painted = key;
  }

  // The colour of a block's lines: from the first block to the last, from orange to blue.
  paintOf(block, colour) {
    const share = block / Math.max(this.records.data.blocks.length - 1, 1);
    return `rgb(${mixColours(colour.negative, colour.positive, share).join(" ")})`;
  }
}
