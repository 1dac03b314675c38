// Small line charts as SVG: time across, values up; a readout follows the mouse or the arrow keys.
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A number as people read it: three digits that count, a true minus, thousands apart.
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, scale] of [["M", 1e6], ["k", 1e4]]) {
    if (size >= scale) { const by = unit === "M" ? 1e6 : 1e3; return (value / by).toPrecision(3).replace("-", "−") + " " + unit; }
  }
  const said = Number.isInteger(value) ? String(value) : String(+value.toPrecision(3));
  return said.replace("-", "−");
}

// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
function nice(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].map((k) => k * power).find((size) => size >= step * (1 - 1e-9));
}

const HOURS = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const TIMES = [60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];

function clock(seconds, fine) {
  const at = new Date(seconds * 1000);
  const said = at.toLocaleTimeString([], fine ? { ...HOURS, second: "2-digit" } : HOURS);
  return at.toDateString() === new Date().toDateString() ? said : `${at.toLocaleDateString([], { month: "short", day: "numeric" })} ${said}`;
}

class Chart {
  // `figure` holds a plot, a readout (`output`) and a place for names of lines (`.keys-of`).
  constructor(figure) {
    this.figure = figure;
    this.plot = figure.querySelector(".plot");
    this.readout = figure.querySelector("output");
    this.names = figure.querySelector(".keys-of");
    this.title = figure.querySelector("h3").textContent;
    this.place = null;  // of the readout, as a time
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") return this.leave();
      if (!step || !this.data?.at.length) return;
      event.preventDefault();
      const { at } = this.data;
      const here = this.place === null ? at.length - 1 : this.nearest(this.place) + step;
      this.place = at[Math.min(at.length - 1, Math.max(0, here))];
      this.redraw();
    });
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  // `lines` are {name, values, css}; a null is a gap that `join` bridges.
  draw(data) { this.data = data; this.redraw(); }

  leave() { this.place = null; this.redraw(); }

  nearest(time) {
    const { at } = this.data;
    return at.reduce((best, one, index) => (Math.abs(one - time) < Math.abs(at[best] - time) ? index : best), 0);
  }

  point(x) {
    if (!this.data?.at.length) return;
    const { left, width, from, to } = this.frame;
    this.place = this.data.at[this.nearest(from + ((x - left) / width) * (to - from))];
    this.redraw();
  }

  redraw() {
    if (!this.data) return;
    const { at, lines, now, span } = this.data;
    const full = this.plot.clientWidth, height = 150, top = 8, bottom = 20;
    if (!full) return;
    const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
    const picture = svg("svg", { viewBox: `0 0 ${full} ${height}`, role: "img", "aria-label": this.said() });
    if (!known.length) {
      picture.append(svg("text", { class: "none", x: full / 2, y: height / 2, "text-anchor": "middle" }, this.data.empty ?? "nothing yet"));
      this.plot.replaceChildren(picture);
      this.names.replaceChildren();
      this.readout.textContent = "";
      return;
    }
    let low = Math.min(...known), high = Math.max(...known);
    if (this.data.zero) low = Math.min(0, low);
    if (high - low < 1e-9) { high += this.data.whole ? 1 : Math.abs(high) * 0.1 || 1; if (!this.data.zero) low -= Math.abs(low) * 0.1 || 0.5; }
    let step = nice((high - low) / 3);
    if (this.data.whole) step = Math.max(1, step);
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    const labels = [];
    for (let k = 0; low + k * step <= high + step / 2; k++) labels.push(low + k * step);
    const left = 10 + 7 * Math.max(...labels.map((value) => short(+value.toPrecision(6)).length));
    const width = full - left - 6, from = now - span, to = now;
    this.frame = { left, width, from, to };
    const x = (time) => left + (width * (time - from)) / (to - from);
    const y = (value) => top + ((height - top - bottom) * (high - value)) / (high - low);
    for (const value of labels) {
      picture.append(svg("line", { class: "grid", x1: left, x2: left + width, y1: y(value), y2: y(value) }));
      picture.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(+value.toPrecision(6))));
    }
    const every = TIMES.find((size) => (span / size) * 56 <= width) ?? 86400;
    const zone = new Date(now * 1000).getTimezoneOffset() * 60;
    for (let time = Math.ceil((from - zone) / every) * every + zone; time <= to; time += every) {
      const place = x(time);
      if (place < left + 16 || place > left + width - 12) continue;
      const said = every >= 86400 ? new Date(time * 1000).toLocaleDateString([], { month: "short", day: "numeric" }) : new Date(time * 1000).toLocaleTimeString([], HOURS);
      picture.append(svg("text", { x: place, y: height - 4, "text-anchor": "middle" }, said));
    }
    for (const line of lines) picture.append(svg("path", { class: line.css, d: this.path(line, x, y) }));
    const chosen = this.place === null ? -1 : this.nearest(this.place);
    if (chosen >= 0) {
      picture.append(svg("line", { class: "cross", x1: x(at[chosen]), x2: x(at[chosen]), y1: top, y2: height - bottom }));
    }
    this.plot.replaceChildren(picture);
    this.readout.textContent = chosen >= 0 ? clock(at[chosen], this.data.seconds < 60) : "";
    this.names.replaceChildren(...lines.map((line) => {
      const name = document.createElement("span"), value = document.createElement("b");
      name.className = line.css;
      value.textContent = short(chosen >= 0 ? line.values[chosen] : line.values.findLast((one) => one !== null));
      name.append(line.name, value);
      return name;
    }));
    if (this.data.more) this.names.append(this.data.more);
  }

  path(line, x, y) {
    const { at, seconds, join } = this.data;
    let path = "", last = null;
    line.values.forEach((value, index) => {
      if (value === null) { if (!join) last = null; return; }
      const broken = last === null || (!join && at[index] - last > 3.5 * seconds);
      path += `${broken ? "M" : "L"}${x(at[index]).toFixed(1)} ${y(value).toFixed(1)}`;
      if (broken) path += "h0.01";  // a point that stands alone is a dot
      last = at[index];
    });
    return path;
  }

  said() {
    return `${this.title}: ${this.data.lines.map((line) => `${line.name} ${short(line.values.findLast((one) => one !== null))}`).join(", ") || "nothing yet"}`;
  }
}

// Of each bin the mean over it and those before it: sums and counts over a window, null where it is empty. A bin
// whose sum is null, as it is where that would be infinite, counts as empty.
function rolling(sums, allCounts, window) {
  const counts = allCounts.map((count, index) => (sums[index] === null ? 0 : count));
  let sum = 0, count = 0;
  return sums.map((_, index) => {
    sum += sums[index];
    count += counts[index];
    if (index >= window) { sum -= sums[index - window]; count -= counts[index - window]; }
    return count ? sum / count : null;
  });
}
