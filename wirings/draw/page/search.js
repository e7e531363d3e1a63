// The search box: finds nodes by number and groups by name.

function setUpSearch({ structure, select, zoomToGroup }) {
  // [text, action] pairs for what is typed in the box
  function matches() {
    const text = get("search").value.trim().toLowerCase(),
      list = [];
    const number = /^(?:node )?(\d+)$/.exec(text);
    if (number && Number(number[1]) < structure.nodes)
      list.push([`node ${Number(number[1])}`, () => select(Number(number[1]))]);
    if (text) {
      structure.groups.forEach(([name, start, stop], i) => {
        if (name.toLowerCase().includes(text))
          list.push([`${name}: nodes ${start} to ${stop - 1}`, () => zoomToGroup(i)]);
      });
    }
    return list.slice(0, 8);
  }

  get("search").addEventListener("input", () => {
    const rows = matches().map(([text, act]) => {
      const button = element("button", text);
      button.type = "button";
      button.addEventListener("click", act);
      return element("li", "", button);
    });
    if (get("search").value.trim() && !rows.length)
      rows.push(element("li", `no match; nodes are numbered 0 to ${structure.nodes - 1}`));
    get("found").replaceChildren(...rows);
  });
  get("find").addEventListener("submit", (event) => {
    event.preventDefault();
    matches()[0]?.[1]();
  });
}
