// The page of a transformer: counts of real edges by block, kind of layer and head, record by record.

const PROJECTIONS = ["q", "k", "v", "out"];

class BlockRecords extends Notes {
  constructor(data) {
    super();
    Object.assign(this, { data, notes: data.notes, steps: data.steps, births: data.births, length: data.steps.length });
  }

  // The density of a cell of the grid, or of a layer outside the blocks, in percent.
  density(cell, at) {
    return (100 * cell.real[at]) / cell.edges;
  }

  // The real edges of a head in all its projections.
  headEdges(attention, head, at) {
    return attention.edges[at].slice(4 * head, 4 * head + 4).reduce((sum, count) => sum + Math.max(count, 0), 0);
  }

  headTotals(attention, at) {
    return Array.from({ length: attention.heads }, (_, head) => this.headEdges(attention, head, at));
  }

  // The title of a cell or head.
  name({ cell, attention, head }) {
    const block = this.data.blocks[(cell ?? attention).block];
    if (cell) return `${block} · ${this.data.columns[cell.column][2]}`;
    return `${block} · ${attention.family === "attention" ? "" : `${attention.family} `}head ${head}`;
  }

  describe(what, at) {
    const { cell, attention, head } = what;
    if (cell) {
      const real = `${formatCount(cell.real[at])} of ${formatCount(cell.edges)}`;
      return `${this.name(what)}: ${real} edges real (${formatTick(this.density(cell, at))} %)`;
    }
    const missing = attention.missing[at][head],
      edges = `${formatCount(this.headEdges(attention, head, at))} real edges`;
    return `${this.name(what)}: ${missing ? `dead, ${explain(missing)}` : edges}`;
  }
}

// What a dead head lacks, in words.
function explain(missing) {
  if (missing === "path") return "the output projection reads none of its values that have a real edge";
  return `no real edge: ${missing}`;
}

function startTransformer(records) {
  const { data } = records;
  const grid = new BlockGrid(records, get("grid"), select),
    timeline = new Timeline(records, get("timeline"), (i) => seek(i)),
    charts = new DensityCharts(records, get("charts"), (step) => seek(timeline.nearest(step)));
  let position = 0, // the record, with a fraction while playing
    shown = -1,
    playing = false,
    last = 0,
    selected = null,
    colour = {};
  const speed = Math.max(3, Math.min(12, records.length / 20)); // records per second

  function seek(record, keepPlaying = false) {
    position = clamp(record, 0, records.length - 1);
    if (!keepPlaying) play(false);
    show();
  }

  function show(again = false) {
    const at = Math.floor(position);
    if (at !== shown || again) {
      shown = at;
      get("slider").value = at;
      get("position").textContent = `step ${formatCount(records.steps[at])} · ${at + 1} of ${records.length}`;
      get("densest").textContent = `${formatTick(grid.show(at, selected, colour))} % (densest layer)`;
      showSummary(at);
      showSelected(at);
      showDead(at);
      showOutside(at);
    }
    charts.draw(colour, records.steps[at], selected && (selected.cell ?? selected.attention).block);
    timeline.draw(colour, position);
  }

  function play(on) {
    if (on === playing || records.length < 2) return;
    if (on && position >= records.length - 1) seek(0);
    playing = on;
    last = performance.now();
    get("play").textContent = on ? "❚❚" : "▶";
    get("play").setAttribute("aria-label", on ? "Pause" : "Play");
    if (on) requestAnimationFrame(frame);
  }

  function frame(now) {
    if (!playing) return;
    const next = position + (Math.min(now - last, 250) / 1000) * speed * Number(get("speed").value);
    last = now;
    if (next >= records.length - 1) play(false);
    seek(next, playing);
    if (playing) requestAnimationFrame(frame);
  }

  // ---- texts ----
  function showSummary(at) {
    const rule = data.about.rule ? `rule ${data.about.rule} · ` : "",
      heads = data.attentions.reduce((sum, one) => sum + one.heads, 0),
      dead = data.attentions.reduce((sum, one) => sum + one.missing[at].filter(Boolean).length, 0);
    const real = `${formatCount(data.real[at])} of ${formatCount(data.edges)} possible edges`,
      share = `${formatTick((100 * data.real[at]) / data.edges)} %`;
    get("summary").textContent =
      `${rule}${data.blocks.length} blocks · ${real} (${share})` + (heads ? ` · ${dead} of ${heads} heads dead` : "");
  }

  function select(what) {
    selected = sameSelection(what ?? {}, selected) ? null : what;
    show(true);
  }

  function showSelected(at) {
    const box = get("selected");
    get("course").hidden = !selected;
    if (!selected) {
      box.replaceChildren(element("p", "Select a layer or a head to see its course."));
      return;
    }
    const parts = [element("h2", records.name(selected))],
      { cell, attention, head } = selected;
    if (cell) {
      parts.push(element("p", cell.layers.slice(0, 4).join(", ") + (cell.layers.length > 4 ? ", …" : "")));
      const real = `${formatCount(cell.real[at])} of ${formatCount(cell.edges)} edges`;
      parts.push(element("p", `${real} real, ${formatTick(records.density(cell, at))} %`));
    } else {
      const missing = attention.missing[at][head];
      if (missing) parts.push(element("p", `dead: ${explain(missing)}`));
      parts.push(headTable(attention, head, at));
      if (attention.shared > 1) parts.push(element("p", `${attention.shared} heads share each key and value.`));
    }
    box.replaceChildren(...parts);
    drawCourse();
  }

  function headTable(attention, head, at) {
    const table = element("table"),
      cells = (tag, texts) => element("tr", "", ...texts.map((text) => element(tag, text)));
    table.append(cells("th", ["", "real edges", "possible", "density"]));
    PROJECTIONS.forEach((name, i) => {
      const count = attention.edges[at][4 * head + i],
        possible = attention.possible[i];
      const numbers = [formatCount(count), formatCount(possible), `${formatTick((100 * count) / possible)} %`];
      table.append(cells("td", [name, ...(count < 0 ? ["dense", "", ""] : numbers)]));
    });
    return table;
  }

  function showDead(at) {
    const rows = element("div");
    rows.className = "rows";
    for (const attention of data.attentions) {
      attention.missing[at].forEach((missing, head) => {
        if (!missing || rows.childElementCount >= 200) return;
        const button = element("button", `${records.name({ attention, head })}: ${deadText(missing)}`);
        button.type = "button";
        button.addEventListener("click", () => select({ attention, head }));
        rows.append(button);
      });
    }
    const known = data.attentions.length > 0;
    const text = known ? "No head is dead." : "The number of heads is not known: give it with --heads.";
    get("dead").replaceChildren(element("h3", "Dead heads"), rows.childElementCount ? rows : element("p", text));
  }

  function showOutside(at) {
    if (!data.outside.length) return;
    const table = element("table");
    for (const cell of data.outside.slice(0, 40)) {
      const density = element("td", `${formatTick(records.density(cell, at))} %`);
      table.append(element("tr", "", element("td", cell.layers[0]), density));
    }
    get("outside").replaceChildren(element("h3", "Density outside the blocks"), table);
  }

  function drawCourse() {
    const fitted = fitCanvas(get("course"));
    if (!fitted) return;
    const { cell, attention, head } = selected;
    const values = records.steps.map((_, at) =>
      cell ? records.density(cell, at) : records.headEdges(attention, head, at),
    );
    const box = { x: 0, y: 0, width: fitted.width, height: fitted.height };
    drawChart(fitted.context, colour, box, {
      steps: records.steps,
      lines: [{ values, paint: colour.positive, width: 1.8 }],
      most: 1.05 * Math.max(...values, 1e-9),
      title: cell ? "density, %" : "real edges",
      xLabel: "optimizer step",
    });
  }

  // ---- themes ----
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    colour = readColours();
    show(true);
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  const toggleTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  const at = () => Math.floor(position);
  setUpPlayer({ replay: records, seek, play, toggleTheme, isPlaying: () => playing, at }, (event) =>
    event.key === "Escape" ? () => select(null) : undefined,
  );
  new ResizeObserver(() => show(true)).observe(get("charts"));
  get("slider").max = records.length - 1;
  if (data.about.note) showNote(data.about.note);
  if (records.length < 2) for (const id of ["player", "timeline", "charts"]) get(id).hidden = true;
  setTheme(dark.matches ? "dark" : "light");
  return { records, grid, charts, seek, play, select };
}

startPage((bytes) => startTransformer(new BlockRecords(JSON.parse(new TextDecoder().decode(bytes)))));
