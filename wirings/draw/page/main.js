// Puts the page together: the player, picking, zoom and themes.

const get = (id) => document.getElementById(id);

function start(film) {
  const view = new View(film, get("ink"), get("marks"), get("over")),
    { structure } = film;
  const panel = new Panel(film, get("node"), pick),
    times = new Times(film, get("times"), (i) => seek(i));
  const frames = []; // times of the last frames, for whoever measures
  let position = 0,
    playing = false,
    last = 0,
    stale = false;
  const speed = Math.max(3, Math.min(12, film.length / 20)); // records a second

  // ---- time ----
  function seek(index, keepPlaying = false) {
    position = Math.max(0, Math.min(film.length - 1, index));
    if (!keepPlaying) play(false);
    const at = Math.floor(position);
    if (at !== film.at) {
      view.show(film.seek(at));
      if (view.picked) tell();
      said(at);
    }
    view.fade = keepPlaying ? position - at : 0;
    draw();
  }

  function said(at) {
    get("slider").value = at;
    get("where").textContent = `step ${count(film.steps[at])} · ${at + 1} of ${film.length}`;
    get("shown").textContent =
      `${count(view.shown)} of ${count(film.now.count)} ${film.about.grouped ? "lines" : "edges"}`;
  }

  function play(on) {
    if (on === playing || film.length < 2) return;
    if (on && position >= film.length - 1) seek(0);
    playing = on;
    last = performance.now();
    get("play").textContent = on ? "❚❚" : "▶";
    get("play").setAttribute("aria-label", on ? "Pause" : "Play");
    draw();
  }

  function draw() {
    if (!stale) requestAnimationFrame(frame);
    stale = true;
  }

  function frame(now) {
    stale = false;
    frames.push(now);
    if (frames.length > 600) frames.shift();
    if (playing) {
      const next = position + (Math.min(now - last, 250) / 1000) * speed * Number(get("speed").value);
      last = now;
      if (next >= film.length - 1) play(false);
      seek(next, playing);
    }
    view.work(playing ? 8 : 24);
    if (view.paint() || view.queue) draw();
    times.draw(view.colour, position);
  }

  // ---- picking ----
  function pick(node) {
    view.picked = node >= 0 ? { node, paths: [] } : null;
    view.changed();
    get("ink").classList.toggle("dim", Boolean(view.picked) && !view.matrix);
    if (view.picked) tell();
    else panel.clear();
    draw();
  }

  function tell() {
    view.picked.paths = panel.show(view.picked.node, film.now);
  }

  // ---- zoom ----
  let waiting = 0;
  function moved() {
    // while it moves only now and then, and once when it rests
    if (!waiting) {
      waiting = setTimeout(() => {
        waiting = 0;
        view.redraw();
        draw();
      }, 30);
    }
  }

  function zoomTo(what) {
    const box = view.over.getBoundingClientRect(),
      middle = [box.left + box.width / 2, box.top + box.height / 2];
    if (what === "in") view.zoomBy(1.5, ...middle);
    else if (what === "out") view.zoomBy(1 / 1.5, ...middle);
    else if (what === "all") Object.assign(view.zoom, { scale: 1, x: 0, y: 0 });
    else {
      view.matrix = !view.matrix;
      get("ink").classList.toggle("dim", Boolean(view.picked) && !view.matrix);
    }
    moved();
  }

  function zoomToGroup(index) {
    const [, begin, end] = structure.groups[index];
    let [left, right, top, low] = [1, 0, 1, 0];
    for (let v = begin; v < end; v++) {
      left = Math.min(left, view.layout.x[v]);
      right = Math.max(right, view.layout.x[v]);
      top = Math.min(top, view.layout.y[v]);
      low = Math.max(low, view.layout.y[v]);
    }
    const scale = Math.max(1, Math.min(8, 0.8 / Math.max(right - left, low - top, 0.1)));
    Object.assign(view.zoom, { scale, x: 0.5 - (scale * (left + right)) / 2, y: 0.5 - (scale * (top + low)) / 2 });
    view.moveBy(0, 0);
    moved();
  }

  // ---- theme ----
  function theme(name) {
    document.documentElement.dataset.theme = name;
    view.colours();
    if (view.layout) view.redraw();
    draw();
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  const otherTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  const filter = finding({ view, film, said, draw, pick, zoomToGroup });
  controls({
    view,
    film,
    seek,
    play,
    pick,
    moved,
    zoomTo,
    otherTheme,
    isPlaying: () => playing,
    at: () => Math.floor(position),
  });
  new ResizeObserver(() => {
    view.resize();
    draw();
  }).observe(get("stage"));

  // ---- begin ----
  const rule = film.about.rule ? `rule ${film.about.rule} · ` : "";
  film.seek(0);
  const nodes = film.about.grouped
    ? `${count(film.about.nodes)} nodes as ${count(structure.nodes)} dots`
    : `${count(structure.nodes)} nodes`;
  const [real, possible] = film.about.edges ?? [film.now.count, film.edges];
  get("summary").textContent = `${rule}${nodes} · ${count(real)} of ${count(possible)} possible edges`;
  get("unused-text").textContent = structure.sure ? "on no path" : "without an edge";
  if (film.about.note) {
    get("note").textContent = film.about.note;
    get("note").hidden = false;
  }
  get("slider").max = film.length - 1;
  if (film.length < 2) {
    for (const id of ["player", "times"]) get(id).hidden = true;
  }
  theme(dark.matches ? "dark" : "light");
  view.resize();
  filter();
  return {
    film,
    view,
    seek,
    play,
    pick,
    frames,
    get playing() {
      return playing;
    },
    get resting() {
      return !stale && !playing && !waiting;
    },
  };
}

inflate(get("data").textContent)
  .then((bytes) => {
    window.wirings = start(new Film(bytes));
    // When the first drawing was on the screen, in ms since the page was asked for.
    requestAnimationFrame(() => requestAnimationFrame((now) => (window.wirings.drawn = now)));
  })
  .catch((error) => {
    get("note").textContent = `This page cannot be shown: ${error.message}`;
    get("note").hidden = false;
    console.error(error);
  });
