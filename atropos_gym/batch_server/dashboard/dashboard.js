// Asks the server how things stand, again and again, and for trajectories when someone wants them.
(() => {
  const POLL = 2000;  // milliseconds
  const PER_PAGE = 10;  // groups
  const WINDOW = 15;  // bins that rewards and staleness are averaged over
  const LINES = 6;
  const $ = (id) => document.getElementById(id);
  const make = (name, text, css) => { const made = document.createElement(name); if (text !== undefined) made.textContent = text; if (css) made.className = css; return made; };
  // Not relative: a page that was opened with a password in its address could then ask nothing.
  const url = (path, query = {}) => { const made = new URL(`dashboard/${path}`, location.origin + location.pathname); made.search = new URLSearchParams(query); return made; };

  async function ask(path, query) {
    const answer = await fetch(url(path, query), { cache: "no-store", signal: AbortSignal.timeout(15000) });
    if (!answer.ok) {
      const { detail } = await answer.json().catch(() => ({}));
      throw new Error(typeof detail === "string" ? detail : `the server answered ${answer.status}`);
    }
    return answer.json();
  }

  // How things stand.
  const charts = Object.fromEntries(["queue", "flow", "reward", "staleness"].map((id) => [id, new Chart($(id))]));
  let span = 600, timer = null, newest = null, answered = null, gone = 0;

  async function poll() {
    clearTimeout(timer);
    if (document.hidden) return;
    const asked = span;
    try {
      const data = await ask("data", { span });
      gone = 0;
      answered = Date.now();
      if (asked === span) show(data);
      live("on", `live · up ${ago(data.now - data.started_at)}`);
    } catch (error) {
      gone += 1;
      const since = answered ? ` since ${clock(answered / 1000, true)}` : "";
      live("off", error.name === "TypeError" || error.name === "TimeoutError" ? `no answer${since}; trying again` : error.message);
    }
    timer = setTimeout(poll, Math.min(15000, POLL * (1 + gone)));
  }

  function live(css, text) {
    $("live").className = css;
    if ($("live-text").textContent !== text) $("live-text").textContent = text;
  }

  function ago(seconds) {
    if (seconds === null || seconds === undefined) return "never";
    const left = Math.max(0, seconds);
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (left >= 1.5 * size) return `${Math.round(left / size)} ${unit}`;
    return `${Math.round(left)} s`;
  }

  function show(data) {
    if ($("why").textContent !== data.why.text) $("why").textContent = data.why.text;
    $("why").className = data.why.tone;
    document.title = `${data.status.current_step ? `step ${data.status.current_step} · ` : ""}Batch server`;
    tiles(data);
    warnings(data.warnings);
    draw(data);
    table($("envs"), ENV_COLUMNS, data.envs, data, "No environment has registered.");
    table($("leases"), LEASE_COLUMNS, data.leases, data, "No batch is under a lease.");
    pairs($("trainer"), trainer(data));
    pairs($("policy"), policy(data));
    arrived(data.gallery);
  }

  function tiles({ status, rates, trainer }) {
    const steps = trainer.settings.num_steps;
    const found = [
      ["step", short(status.current_step), steps > 0 ? `of ${short(steps)}` : ""],
      ["policy", short(status.policy_version), status.policy_version === null ? "none yet" : "version"],
      ["queue", short(status.queue_size), `groups, ${short(status.queue_sequences)} sequences`],
      ["under lease", short(status.leased_groups), "groups"],
      ["groups in", short(rates.groups_in), "a second"],
      ["ids in", short(rates.ids_in), "a second"],
    ];
    $("tiles").replaceChildren(...found.map(([name, value, unit]) => {
      const box = make("div"), shown = make("dd", value);
      shown.append(make("small", unit));
      box.append(make("dt", name), shown);
      return box;
    }));
  }

  function warnings(texts) {
    $("warnings").hidden = !texts.length;
    $("warnings").querySelector("summary").textContent = texts.length === 1 ? "1 remark" : `${texts.length} remarks`;
    const list = $("warnings").querySelector("ul");
    if (list.dataset.said === texts.join("\n")) return;
    list.dataset.said = texts.join("\n");
    list.replaceChildren(...texts.map((text) => make("li", text)));
  }

  const colours = new Map();  // an environment keeps its colour
  const cssOf = (name) => { if (!colours.has(name)) colours.set(name, colours.size); return `l${colours.get(name) % LINES}`; };

  function draw({ series, now }) {
    // A young server's charts begin with it.
    const seconds = series.seconds, age = series.at.length ? now - series.at[0] : 0;
    const common = { at: series.at.map((at) => at + seconds / 2), now, span: Math.min(series.span, Math.max(120, age)), seconds };
    const smooth = (values) => rolling(values, values.map(() => 1), 5);
    charts.queue.draw({ ...common, zero: true, whole: true, lines: [
      { name: "queued", values: series.queue_groups, css: "l0" },
      { name: "under lease", values: series.leased_groups, css: "l1" },
    ] });
    charts.flow.draw({ ...common, zero: true, lines: [
      { name: "in", values: smooth(series.groups_in), css: "l0" },
      { name: "out", values: smooth(series.groups_out), css: "l1" },
    ] });
    const names = Object.keys(series.envs).sort();
    const sent = (name) => series.envs[name].groups.reduce((sum, count) => sum + count, 0);
    const shown = names.length > LINES ? [...names].sort((a, b) => sent(b) - sent(a)).slice(0, LINES).sort() : names;
    const more = names.length > LINES ? `${names.length - LINES} more` : "";
    const lines = (sums, counts) => shown
      .map((name) => ({ name, css: cssOf(name), values: rolling(series.envs[name][sums], series.envs[name][counts], WINDOW) }))
      .filter((line) => line.values.some((value) => value !== null));
    charts.reward.draw({ ...common, join: true, more, lines: lines("scores", "sequences"), empty: "no group came in this time" });
    charts.staleness.draw({ ...common, join: true, zero: true, more, lines: lines("ages", "aged"), empty: "no delivered group says its version" });
  }

  // Tables. A column is [title, value of a row, css]; a value is text or a node.
  const dotted = (text, on) => { const cell = make("span"); cell.append(make("span", undefined, on ? "dot on" : "dot"), text); cell.title = on ? "connected" : "disconnected"; return cell; };
  const ENV_COLUMNS = [
    ["name", (env) => dotted(env.wandb_name, env.connected)],
    ["queued", (env) => short(env.queue_groups), "num"],
    ["received", (env) => short(env.groups_received), "num"],
    ["refused", (env) => short(env.groups_refused), "num less"],
    ["mean score", (env) => (env.score_mean === null ? "–" : env.score_mean.toFixed(3).replace("-", "−")), "num"],
    ["group size", (env) => env.group_size, "num less"],
    ["weight", (env) => short(env.weight), "num less"],
    ["minimum", (env) => (env.min_batch_allocation ? `${Math.round(100 * env.min_batch_allocation)} %` : "–"), "num less"],
    ["last seen", (env, { now }) => `${ago(now - env.last_seen)} ago`, "num"],
  ];
  const LEASE_COLUMNS = [
    ["batch", (lease) => lease.batch_id],
    ["step", (lease) => lease.step, "num"],
    ["groups", (lease) => lease.groups, "num"],
    ["delivery", (lease) => lease.delivery, "num"],
    ["runs out", (lease, { now }) => (lease.expires_at === null ? "being read" : `in ${ago(lease.expires_at - now)}`), "num"],
  ];

  function table(place, columns, rows, data, empty) {
    if (!rows.length) return place.replaceChildren(make("p", empty, "none"));
    const made = make("table"), head = make("tr");
    head.append(...columns.map(([title, , css]) => { const cell = make("th", title, css); cell.scope = "col"; return cell; }));
    made.append(head, ...rows.map((row) => {
      const line = make("tr", undefined, row.connected === false ? "former" : "");
      line.append(...columns.map(([, value, css]) => { const cell = make("td", undefined, css); cell.append(value(row, data)); return cell; }));
      return line;
    }));
    place.replaceChildren(made);
  }

  function pairs(place, found) {
    place.replaceChildren(...found.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [make("dt", name), make("dd", String(value))]));
  }

  function trainer({ trainer: { registered, last_seen, settings }, now }) {
    if (!registered) return [["state", "none has registered"]];
    const lag = settings.max_policy_lag;
    return [
      ["last heard of", `${ago(now - last_seen)} ago`],
      ["batch", settings.groups_per_update ? `${settings.groups_per_update} groups` : `${settings.batch_size} sequences${settings.exact_batches ? ", exact" : ""}`],
      ["longest sequence", settings.max_token_len > 0 ? `${short(settings.max_token_len)} ids` : "any"],
      ["most versions behind", lag],
      ["steps", settings.num_steps > 0 ? settings.num_steps : null],
      ["project", [settings.wandb_project, settings.wandb_group].filter(Boolean).join(" / ")],
      ["checkpoints", settings.checkpoint_dir],
    ];
  }

  function policy({ policy: one, now }) {
    if (one.version === null) return [["state", "none has been published"]];
    return [
      ["version", `${one.version}${one.finished ? ", finished" : ""}`],
      ["published", one.published_at ? `${ago(now - one.published_at)} ago` : ""],
      ["model", one.model_name],
      ["base", one.base_model],
      ["run", one.run],
      ["adapter", one.adapter_path],
      ["still in use", one.held?.join(", ")],
      ["tokenizer", one.tokenizer_fingerprint?.slice(0, 19)],
    ];
  }

  // Trajectories.
  const list = $("list"), about = $("about"), tell = tellOfIds(list, about);
  let earlier = [null], top = null, asking = 0;  // where each page up to this one begins

  function arrived(gallery) {
    newest = gallery.newest;
    const count = top === null ? 0 : newest - top;
    const fresh = earlier.length === 1 && newest !== null && (top === null || count > 0 || count < 0);
    $("newer").hidden = !fresh || top === null || $("follow").checked;
    $("newer").textContent = count === 1 ? "1 newer group" : count > 0 ? `${count} newer groups` : "show the latest";
    if (fresh && ((top === null && !$("find").value) || $("follow").checked)) load(true);
  }

  // `quietly`: what is shown stays until the answer is there.
  async function load(quietly = false) {
    const number = (asking += 1), before = earlier.at(-1), find = $("find").value.trim();
    if (!quietly) $("count").textContent = "looking …";
    const known = newest;
    try {
      const found = await ask("trajectories", { count: PER_PAGE, ...(find && { find }), ...(before !== null && { before }) });
      if (number !== asking) return;
      place(found, known, find);
    } catch (error) {
      if (number === asking) $("count").textContent = error.message;
    }
  }

  function place({ groups, more, kept }, known, find) {
    if (earlier.length === 1) top = find ? known : groups[0]?.number ?? null;
    tell(null);
    list.replaceChildren(...groups.map(article));
    if (!groups.length) list.append(make("p", find ? "Nothing that is kept says this." : "No group has come since the server started.", "wait-for"));
    $("count").textContent = kept ? `latest ${kept} groups are kept` : "";
    $("pages").hidden = earlier.length === 1 && !more;
    $("where").textContent = `page ${earlier.length}`;
    $("back").disabled = earlier.length === 1;
    $("on").disabled = !more;
    $("on").dataset.before = groups.at(-1)?.number ?? "";
    $("newer").hidden = true;
    const first = list.querySelector("details.found") ?? list.querySelector("details");
    if (first) first.open = true;
  }

  function article(group) {
    const box = make("article", undefined, "group");
    box.innerHTML = group.head;
    box.dataset.number = group.number;
    box.prepend(make("span", clock(group.at, true), "when"));
    group.episodes.forEach((episode, index) => {
      const details = make("details", undefined, episode.found ? "episode found" : "episode");
      details.id = `g${group.number}-${index}`;
      details.innerHTML = `<summary>${episode.head}<span class="chip">${episode.ids.toLocaleString()} ids</span></summary>`;
      details.addEventListener("toggle", () => { if (details.open) fill(details, group.number, index); });
      box.append(details);
    });
    return box;
  }

  async function fill(details, number, index) {
    if (details.children.length > 1) return;
    const body = make("div");
    body.append(make("p", "drawing …", "wait-for"));
    details.append(body);
    try {
      const { html } = await ask(`trajectories/${number}/${index}`);
      body.innerHTML = html;
      makeFocusable(body);
      markText(list, $("find").value.trim().toLowerCase());
    } catch (error) {
      body.replaceChildren(make("p", error.message, "wait-for"));
    }
  }

  function restart() { earlier = [null]; load(); }

  const toggle = (box, name) => $(box).addEventListener("change", () => document.body.classList.toggle(name, $(box).checked));
  toggle("trained", "only-trained");
  toggle("ids", "show-ids");
  let typing;
  $("find").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(restart, 300); });
  $("follow").addEventListener("change", () => { if ($("follow").checked) restart(); });
  document.querySelector(".bar").addEventListener("submit", (event) => event.preventDefault());
  $("newer").addEventListener("click", restart);
  $("on").addEventListener("click", () => { earlier.push(+$("on").dataset.before); load().then(() => $("latest").scrollIntoView()); });
  $("back").addEventListener("click", () => { earlier.pop(); load().then(() => $("latest").scrollIntoView()); });
  for (const button of $("span").children) {
    button.addEventListener("click", () => {
      span = +button.dataset.span;
      for (const other of $("span").children) other.setAttribute("aria-pressed", String(other === button));
      poll();
    });
  }
  episodeKeys(list, $("find"), tell);
  document.addEventListener("visibilitychange", poll);
  poll();
})();
