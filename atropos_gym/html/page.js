"use strict";
// Draws the episodes that the page holds as data: a page of groups at a time, an episode's ids when it opens.
(() => {
  const PER_PAGE = 25;  // groups
  const $ = (id) => document.getElementById(id);
  const { groups, parts } = JSON.parse($("data").textContent);
  const bodyOf = (episode) => episode.body.map((place) => parts[place]).join("");
  const list = $("list"), about = $("about");
  const all = groups.flatMap((group) => group.episodes);
  const byNumber = new Map(all.map((episode) => [episode.number, episode]));
  let page = 0, shown = groups;

  const ENTITIES = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#x27;": "'" };
  // Attributes hold no ">": every text of the page is escaped.
  const plain = (html) => html.replace(/<[^>]*>/g, "").replace(/&[^;]+;/g, (entity) => ENTITIES[entity] ?? entity);
  const text = (episode) => (episode.text ??= plain(`${episode.head}\n${bodyOf(episode)}`).replaceAll("⏎\n", "\n").toLowerCase());

  function matches(episode) {
    const wanted = $("find").value.toLowerCase();
    if ($("invalid").checked && !episode.invalid) return false;
    if ($("outcome").value !== "" && episode.solved !== +$("outcome").value) return false;
    return !wanted || text(episode).includes(wanted);
  }

  function filter() {
    shown = groups.map((group) => ({ ...group, found: group.episodes.filter(matches) })).filter((group) => group.found.length);
    const found = shown.reduce((sum, group) => sum + group.found.length, 0);
    $("count").textContent = found === all.length ? `${all.length} episodes` : `${found} of ${all.length} episodes`;
    page = 0;
    draw();
    mark();
  }

  function draw() {
    const part = shown.slice(page * PER_PAGE, (page + 1) * PER_PAGE);
    list.replaceChildren(...part.map(article));
    const pages = Math.ceil(shown.length / PER_PAGE);
    $("pages").hidden = pages < 2;
    $("where").textContent = `page ${page + 1} of ${pages}`;
    $("back").disabled = page === 0;
    $("on").disabled = page >= pages - 1;
    tell(null);
    const first = list.querySelector("details");
    if (first) open(first);
  }

  function open(details) { details.open = true; fill(details); }

  function article(group) {
    const box = document.createElement("article");
    box.className = "group";
    box.innerHTML = group.head;
    for (const episode of group.found) {
      const details = document.createElement("details");
      details.className = "episode";
      details.id = `e${episode.number}`;
      details.innerHTML = `<summary>${episode.head}</summary>`;
      details.addEventListener("toggle", () => { if (details.open) { fill(details); mark(); } });
      box.append(details);
    }
    return box;
  }

  function fill(details) {
    if (details.children.length > 1) return;
    const body = document.createElement("div");
    body.innerHTML = bodyOf(byNumber.get(+details.id.slice(1)));
    makeFocusable(body);
    details.append(body);
  }

  const mark = () => markText(list, $("find").value.toLowerCase());
  const tell = tellOfIds(list, about);

  episodeKeys(list, $("find"), tell);

  function go() {
    const number = +(/^#e(\d+)$/.exec(location.hash)?.[1] ?? NaN);
    const at = shown.findIndex((group) => group.found.includes(byNumber.get(number)));
    if (at < 0) return false;
    page = Math.floor(at / PER_PAGE);
    draw();
    const details = $(`e${number}`);
    open(details);
    details.scrollIntoView();
    return true;
  }

  const toggle = (box, name) => $(box).addEventListener("change", () => document.body.classList.toggle(name, $(box).checked));
  toggle("trained", "only-trained");
  toggle("ids", "show-ids");
  let waiting;
  $("find").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 150); });
  $("invalid").addEventListener("change", filter);
  $("outcome").addEventListener("change", filter);
  document.querySelector(".bar").addEventListener("submit", (event) => event.preventDefault());
  $("back").addEventListener("click", () => { page -= 1; draw(); scrollTo(0, 0); });
  $("on").addEventListener("click", () => { page += 1; draw(); scrollTo(0, 0); });
  addEventListener("hashchange", go);
  // On paper nothing can be opened.
  addEventListener("beforeprint", () => list.querySelectorAll("details").forEach(open));

  filter();
  go();
})();
