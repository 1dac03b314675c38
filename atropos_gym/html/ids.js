"use strict";
// What pages of rows share: telling of an id, marking what was searched for, keys.

// Lets the keyboard reach the ids of what was just drawn.
function makeFocusable(body) {
  for (const pre of body.querySelectorAll("pre")) { pre.tabIndex = 0; pre.setAttribute("aria-label", "ids; arrow keys go through them"); }
}

// Listens to the ids in `list` and tells of one in `about`. Returns `tell(id)`; `tell(null)` closes it.
function tellOfIds(list, about) {
  const SOURCES = { t: "template", m: "message", s: "sampled", u: "prompt" };
  let current = null;

  function tell(id) {
    current?.classList.remove("at");
    current = id;
    if (!id) { about.hidden = true; return; }
    id.classList.add("at");
    const pre = id.parentElement;
    let position = +pre.dataset.at;
    for (const other of pre.children) { if (other === id) break; position += other.dataset.i?.split(" ").length ?? 0; }
    const ids = id.dataset.i.split(" "), logprobs = id.dataset.l?.split(" "), advantages = id.dataset.a?.split(" ");
    const source = SOURCES[[...id.classList].find((name) => SOURCES[name])];
    const where = pre.parentElement.querySelector(".name").textContent;
    about.replaceChildren(...ids.map((number, index) => {
      const line = document.createElement("div");
      const add = (label, value) => { const item = document.createElement("div"); const dim = document.createElement("span"); dim.textContent = label + " "; item.append(dim, value); line.append(item); };
      const piece = document.createElement("code");
      piece.textContent = id.textContent.replaceAll("⏎\n", "⏎").replaceAll(" ", "␣") + (ids.length > 1 ? ` (${index + 1} of ${ids.length})` : "");
      line.append(piece);
      add("id", number);
      add("position", position + index);
      add("in", where);
      add("from", source);
      add("", id.classList.contains("y") ? "trained" : "not trained");
      if (logprobs) { add("logprob", logprobs[index].replace("-", "−")); add("p", Math.exp(+logprobs[index]).toPrecision(3)); }
      if (advantages) add("advantage", advantages[index].replace("-", "−"));
      return line;
    }));
    about.hidden = false;
  }

  const idOf = (event) => event.target.closest?.("pre b");
  list.addEventListener("mouseover", (event) => { const id = idOf(event); if (id) tell(id); });
  list.addEventListener("click", (event) => { const id = idOf(event); if (id) tell(id); });
  list.addEventListener("focusin", (event) => { if (event.target.matches("pre") && event.target !== current?.parentElement) tell(event.target.querySelector("b")); });
  list.addEventListener("keydown", (event) => {
    if (!event.target.matches("pre") || !current) return;
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = current[step];
    if (next) { tell(next); next.scrollIntoView({ block: "nearest" }); }
  });

  return tell;
}

// Marks a text in the episodes that are open, in lower case; it may run over many ids.
function markText(list, wanted) {
  if (!globalThis.Highlight) return;
  const found = new Highlight();
  for (const pre of wanted ? list.querySelectorAll("details[open] pre") : []) {
    const places = [];  // of each character: its node and offset
    let said = "";
    for (const id of pre.children) {
      const node = id.firstChild;
      for (let at = 0; node && at < node.data.length; at++) {
        if (node.data[at] === "⏎" && node.data[at + 1] === "\n") continue;
        said += node.data[at].toLowerCase()[0];
        places.push([node, at]);
      }
    }
    for (let at = said.indexOf(wanted); at >= 0; at = said.indexOf(wanted, at + wanted.length)) {
      const range = new Range(), [last, end] = places[at + wanted.length - 1];
      range.setStart(...places[at]);
      range.setEnd(last, end + 1);
      found.add(range);
    }
  }
  CSS.highlights.set("found", found);
}

// Keys: / finds, j and k go through the episodes, Escape closes what is told of an id.
function episodeKeys(list, find, tell) {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { tell(null); if (event.target.matches("input")) event.target.blur(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=search],select")) return;
    if (event.key === "/") { event.preventDefault(); find.focus(); }
    if (event.key === "j" || event.key === "k") {
      const heads = [...list.querySelectorAll("summary")];
      const here = heads.indexOf(document.activeElement.closest("details.episode")?.querySelector("summary"));
      const next = heads[Math.min(heads.length - 1, Math.max(0, here + (event.key === "j" ? 1 : -1)))];
      if (next) { next.focus(); next.scrollIntoView({ block: "nearest" }); }
    }
  });
}
