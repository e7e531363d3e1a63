// Filters and search. Gives the function that applies the filters.

function finding({ view, film, said, draw, pick, zoomToGroup }) {
  const { structure } = film;

  // ---- filters ----
  const reach = Math.max(1, film.steps[film.length - 1] - film.steps[0]);
  const ages = (value) => Math.round((value / 1000) ** 2 * reach); // finer where edges are young
  for (const id of ["from", "to"]) {
    get(id).append(new Option("all", -1), ...structure.groups.map(([name], i) => new Option(name, i)));
  }
  function filter() {
    const number = (id) => Number(get(id).value),
      strength = number("strength");
    const youngest = ages(number("youngest")),
      oldest = number("oldest") === 1000 ? Infinity : ages(number("oldest"));
    view.filter = { from: number("from"), to: number("to"), sign: number("sign"), strength, youngest, oldest };
    get("strength-is").textContent = strength ? short(strengthOf(strength)) : "all";
    get("youngest-is").textContent = youngest ? count(youngest) : "all";
    get("oldest-is").textContent = oldest < Infinity ? count(oldest) : "all";
    view.show(film.now);
    view.changed();
    said(film.at);
    draw();
  }
  get("filters").addEventListener("input", filter);
  get("clear").addEventListener("click", () => {
    for (const [id, value] of [
      ["from", -1],
      ["to", -1],
      ["sign", 0],
      ["strength", 0],
      ["youngest", 0],
      ["oldest", 1000],
    ])
      get(id).value = value;
    filter();
  });

  // ---- search ----
  function matches() {
    const text = get("search").value.trim().toLowerCase(),
      list = [];
    const number = /^(?:node )?(\d+)$/.exec(text);
    if (number && Number(number[1]) < structure.nodes)
      list.push([`node ${Number(number[1])}`, () => pick(Number(number[1]))]);
    if (text) {
      structure.groups.forEach(([name, begin, end], i) => {
        if (name.toLowerCase().includes(text))
          list.push([`${name}: nodes ${begin} to ${end - 1}`, () => zoomToGroup(i)]);
      });
    }
    return list.slice(0, 8);
  }
  get("search").addEventListener("input", () => {
    const list = matches();
    const rows = list.map(([text, act]) => {
      const button = element("button", text);
      button.type = "button";
      button.addEventListener("click", act);
      return element("li", "", button);
    });
    if (get("search").value.trim() && !rows.length)
      rows.push(element("li", `nothing of that name: nodes are 0 to ${structure.nodes - 1}`));
    get("found").replaceChildren(...rows);
  });
  get("find").addEventListener("submit", (event) => {
    event.preventDefault();
    matches()[0]?.[1]();
  });
  return filter;
}
