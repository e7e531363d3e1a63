// Puts the page together: playing, selecting, zooming and themes.

function start(replay) {
  const view = new View(replay, get("edges"), get("changes"), get("overlay")),
    { structure } = replay;
  const panel = new NodePanel(replay, get("node"), select),
    timeline = new Timeline(replay, get("timeline"), (i) => seek(i));
  const frames = []; // times of the last frames, for benchmarks
  let position = 0, // the record, with a fraction while playing
    playing = false,
    last = 0,
    frameRequested = false;
  const speed = Math.max(3, Math.min(12, replay.length / 20)); // records per second

  // ---- playing ----
  function seek(record, keepPlaying = false) {
    position = clamp(record, 0, replay.length - 1);
    if (!keepPlaying) play(false);
    const at = Math.floor(position);
    if (at !== replay.at) {
      view.showState(replay.seek(at));
      if (view.selected) showSelected();
      showStatus(at);
    }
    view.fade = keepPlaying ? position - at : 0;
    requestFrame();
  }

  function showStatus(at) {
    get("slider").value = at;
    get("position").textContent = `step ${formatCount(replay.steps[at])} · ${at + 1} of ${replay.length}`;
    get("shown").textContent =
      `${formatCount(view.shown)} of ${formatCount(replay.now.count)} ${replay.about.grouped ? "lines" : "edges"}`;
  }

  function play(on) {
    if (on === playing || replay.length < 2) return;
    if (on && position >= replay.length - 1) seek(0);
    playing = on;
    last = performance.now();
    get("play").textContent = on ? "❚❚" : "▶";
    get("play").setAttribute("aria-label", on ? "Pause" : "Play");
    requestFrame();
  }

  function requestFrame() {
    if (!frameRequested) requestAnimationFrame(frame);
    frameRequested = true;
  }

  function frame(now) {
    frameRequested = false;
    frames.push(now);
    if (frames.length > 600) frames.shift();
    if (playing) {
      const next = position + (Math.min(now - last, 250) / 1000) * speed * Number(get("speed").value);
      last = now;
      if (next >= replay.length - 1) play(false);
      seek(next, playing);
    }
    view.drawQueued(playing ? 8 : 24);
    if (view.paint() || view.queue) requestFrame();
    timeline.draw(view.colour, position);
  }

  // ---- selecting ----
  function select(node) {
    view.selected = node >= 0 ? { node, paths: [] } : null;
    view.invalidate();
    dimEdges();
    if (view.selected) showSelected();
    else panel.clear();
    requestFrame();
  }

  function showSelected() {
    view.selected.paths = panel.show(view.selected.node, replay.now);
  }

  function dimEdges() {
    get("edges").classList.toggle("dim", Boolean(view.selected) && !view.matrix);
  }

  // ---- zooming ----
  let redrawTimer = 0;
  function redrawSoon() {
    // redraws at most every 30 ms while the picture moves, and once when it rests
    if (!redrawTimer) {
      redrawTimer = setTimeout(() => {
        redrawTimer = 0;
        view.redraw();
        requestFrame();
      }, 30);
    }
  }

  function zoomTo(what) {
    const box = view.overlay.getBoundingClientRect(),
      middle = [box.left + box.width / 2, box.top + box.height / 2];
    if (what === "in") view.zoomBy(1.5, ...middle);
    else if (what === "out") view.zoomBy(1 / 1.5, ...middle);
    else if (what === "all") Object.assign(view.zoom, { scale: 1, x: 0, y: 0 });
    else {
      view.matrix = !view.matrix;
      dimEdges();
    }
    redrawSoon();
  }

  function zoomToGroup(index) {
    const [, first, end] = structure.groups[index];
    let [left, right, top, low] = [1, 0, 1, 0];
    for (let v = first; v < end; v++) {
      left = Math.min(left, view.layout.x[v]);
      right = Math.max(right, view.layout.x[v]);
      top = Math.min(top, view.layout.y[v]);
      low = Math.max(low, view.layout.y[v]);
    }
    const scale = clamp(0.8 / Math.max(right - left, low - top, 0.1), 1, 8);
    Object.assign(view.zoom, { scale, x: 0.5 - (scale * (left + right)) / 2, y: 0.5 - (scale * (top + low)) / 2 });
    view.moveBy(0, 0);
    redrawSoon();
  }

  // ---- themes ----
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    view.readColours();
    if (view.layout) view.redraw();
    requestFrame();
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  const toggleTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  const applyFilters = setUpFilters({ view, replay, showStatus, requestFrame });
  setUpSearch({ structure, select, zoomToGroup });
  setUpControls({
    view,
    replay,
    seek,
    play,
    select,
    redrawSoon,
    zoomTo,
    toggleTheme,
    isPlaying: () => playing,
    at: () => Math.floor(position),
  });
  new ResizeObserver(() => {
    view.resize();
    requestFrame();
  }).observe(get("stage"));

  // ---- the first drawing ----
  replay.seek(0);
  showSummary(replay);
  get("slider").max = replay.length - 1;
  if (replay.length < 2) {
    for (const id of ["player", "timeline"]) get(id).hidden = true;
  }
  setTheme(dark.matches ? "dark" : "light");
  view.resize();
  applyFilters();
  return {
    replay,
    view,
    seek,
    play,
    select,
    frames,
    get playing() {
      return playing;
    },
    get resting() {
      return !frameRequested && !playing && !redrawTimer;
    },
  };
}

// The line below the title, the legend, and the note.
function showSummary({ about, structure, now, edges }) {
  const rule = about.rule ? `rule ${about.rule} · ` : "",
    [real, possible] = about.edges ?? [now.count, edges];
  const nodes = about.grouped
    ? `${formatCount(about.nodes)} nodes as ${formatCount(structure.nodes)} dots`
    : `${formatCount(structure.nodes)} nodes`;
  get("summary").textContent = `${rule}${nodes} · ${formatCount(real)} of ${formatCount(possible)} possible edges`;
  get("unused-text").textContent = structure.sure ? "unused node" : "node without edges";
  if (about.note) showNote(about.note);
}

startPage((bytes) => start(new Replay(bytes)));
