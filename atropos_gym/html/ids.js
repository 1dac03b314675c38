"use strict";
// Ids under the mouse or the arrow keys: what is known of one of them, said at the foot of a page.

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
      piece.textContent = id.textContent.replaceAll("⏎\n", "⏎") + (ids.length > 1 ? ` (${index + 1} of ${ids.length})` : "");
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
