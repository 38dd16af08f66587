"use strict";
// Draws the timelines of a step, and its imbalance over the steps, as SVG; colours are those of style.css.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const timelines = read("timelines");
  const imbalance = read("lines");
  const select = document.getElementById("step");
  const tip = document.getElementById("tip");
  const MAX_SAMPLES = 12; // that a tooltip lists
  const TITLES = {
    stock: "Before: stock sampler, predicted", planned: "After: the plan, predicted", measured: "After: measured",
  };

  const count = (value) => value.toLocaleString("en-US");
  const PREFIXES = { "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z" };

  function amount(value, unit = timelines.unit) {
    if (unit === "tokens") return `${count(Math.round(value))} tokens`;
    if (!value) return `0 ${unit}`;
    const power = Math.min(Math.max(3 * Math.floor(Math.log10(value) / 3 + 1e-9), -9), unit === "s" ? 0 : 21);
    return `${Number((value / 10 ** power).toPrecision(3))} ${PREFIXES[power]}${unit}`;
  }

  const FORMATS = {
    amount, count, ratio: (value) => value.toFixed(2),
  };

  function add(parent, tag, attributes, text = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    parent.append(node);
    return node;
  }

  // Show the lines that a drawing has to say of the place that is pointed at.
  function explain(box, linesAt) {
    const show = (event) => {
      const lines = linesAt(event);
      tip.hidden = !lines;
      if (!lines) return;
      tip.textContent = lines.join("\n");
      const [right, bottom] = [window.innerWidth - tip.offsetWidth - 8, window.innerHeight - tip.offsetHeight - 8];
      tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, right))}px`;
      tip.style.top = `${Math.max(0, Math.min(event.clientY + 14, bottom))}px`;
    };
    [box.onpointermove, box.onpointerdown, box.onpointerleave] = [show, show, () => { tip.hidden = true; }];
  }

  // Where values of an axis lie between two pixels.
  function scaleOf({ low, high }, from, to) {
    return (value) => from + ((value - low) / (high - low)) * (to - from);
  }

  // Round numbers on an axis: 1, 2 and 5 times powers of ten, about `most` of them.
  function ticksOf({ low, high, format }, most) {
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const nice = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
    const step = format === "count" ? Math.max(nice, 1) : nice;
    const first = Math.ceil(low / step - 1e-9);
    const number = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: number }, (_, index) => (first + index) * step);
  }

  function drawAxis(svg, axis, scale, { bottom, left, top = 0, right }, most) {
    const isX = bottom !== undefined;
    for (const tick of ticksOf(axis, most)) {
      const at = scale(tick);
      const label = isX ? { x: at, y: bottom + 16, "text-anchor": "middle" } : { x: left - 6, y: at + 4, "text-anchor": "end" };
      const grid = isX ? { x1: at, x2: at, y1: top, y2: bottom } : { x1: left, x2: right, y1: at, y2: at };
      add(svg, "line", { class: "grid", ...grid });
      add(svg, "text", { class: isX ? "xtick" : "ytick", ...label }, FORMATS[axis.format](tick));
    }
  }

  // Lines over the steps.
  function drawImbalance(lines) {
    const [x, y] = [{ title: "step", format: "count" }, { title: "slowest / mean", format: "ratio" }];
    const box = document.getElementById("imbalance");
    const legend = document.createElement("p");
    legend.className = "legend";
    lines.forEach((line) => {
      const key = document.createElement("span");
      [key.textContent, key.className] = [line.name, line.colour];
      legend.append(key);
    });
    box.replaceChildren(legend);
    const [width, height] = [box.clientWidth, box.clientHeight - legend.offsetHeight];
    const svg = add(box, "svg", { width, height });
    const [left, right, bottom] = [64, width - 28, height - 44];
    const withEnds = (axis, key) => {
      const values = lines.flatMap((line) => line[key]).filter((value) => value !== null);
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const room = (most - least || Math.abs(most) || 1) * 0.04;
      return { ...axis, low: least - room, high: most + room };
    };
    const axes = { x: withEnds(x, "x"), y: withEnds(y, "y") };
    const [toX, toY] = [scaleOf(axes.x, left, right), scaleOf(axes.y, bottom, 8)];
    drawAxis(svg, axes.x, toX, { bottom, top: 8 }, (right - left) / 80);
    drawAxis(svg, axes.y, toY, { left, right }, 6);
    add(svg, "text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title);
    add(svg, "text", { x: -bottom / 2, y: 14, "text-anchor": "middle", transform: "rotate(-90)" }, y.title);
    const points = lines.flatMap((line) => {
      const [shown, pieces] = [[], []];
      line.x.forEach((value, index) => {
        if (line.y[index] === null) return;
        const [at, up] = [toX(value), toY(line.y[index])];
        const starts = !index || line.y[index - 1] === null;
        pieces.push(starts ? `M${at} ${up}` : `L${at} ${up}`);
        shown.push({ at, up, text: `${line.name}: ${FORMATS[x.format](value)}, ${FORMATS[y.format](line.y[index])}` });
      });
      const group = add(svg, "g", { class: `trace ${line.colour}` });
      add(group, "path", { d: pieces.join("") });
      if (shown.length < 40) shown.forEach(({ at, up }) => add(group, "circle", { cx: at, cy: up, r: 2.5 }));
      return shown;
    });
    explain(box, (event) => {
      const { left: origin, top } = svg.getBoundingClientRect();
      const distance = ({ at, up }) => Math.hypot(at - event.clientX + origin, up - event.clientY + top);
      const nearest = points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
      return distance(nearest) < 40 ? [nearest.text] : null;
    });
  }

  // The micro-batches of a timeline, as rows of bars, and the waiting between them.
  function slicesOf(panel, step) {
    const work = [];
    const waits = [];
    step.ranks.forEach((rank, row) => {
      let free = 0;
      panel.samples[row].forEach((ids, slot) => {
        const [start, end] = [panel.starts[row][slot], panel.ends[row][slot]];
        const size = panel.sizes.length ? panel.sizes[row][slot] : 1;
        if (!size) return; // a DP×CP rank without this slot
        if (start > free) waits.push({ row, rank, start: free, end: start });
        work.push({ row, rank, slot, start, end, ids, size });
        free = Math.max(free, end);
      });
      if (panel.total > free) waits.push({ row, rank, start: free, end: panel.total });
    });
    return { work, waits };
  }

  function about(slice, panel, step) {
    const { lengths } = step;
    const time = `${amount((slice.end - slice.start) * step.tick)}${panel.key === "measured" ? "" : " predicted"}`;
    const first = slice.rank - (slice.rank % slice.size);
    const ranks = slice.size > 1 ? `ranks ${first} to ${first + slice.size - 1}` : `rank ${slice.rank}`;
    const head = [`${ranks}, micro-batch ${slice.slot}${panel.sizes.length ? `, CP ${slice.size}` : ""}`, time];
    if (!slice.ids.length) return [...head, "no samples: a masked dummy"];
    const tokens = slice.ids.reduce((sum, id) => sum + lengths[id], 0);
    const shown = slice.ids.slice(0, MAX_SAMPLES).map((id) => `sample ${id}: ${count(lengths[id])}`);
    if (slice.ids.length > MAX_SAMPLES) shown.push(`and ${slice.ids.length - MAX_SAMPLES} more`);
    const samples = slice.ids.length === 1 ? "1 sample" : `${slice.ids.length} samples`;
    return [...head, `${samples}, ${count(tokens)} tokens`, ...shown];
  }

  // A micro-batch that several ranks share is one block over them, where all are drawn and run it at the same time.
  function blocksOf(work) {
    const blocks = new Map();
    const whole = (slices) => slices.length === slices[0].size && slices.every((slice) =>
      Math.abs(slice.start - slices[0].start) <= 1 && Math.abs(slice.end - slices[0].end) <= 1);
    work.forEach((slice) => {
      const key = `${slice.rank - (slice.rank % slice.size)} ${slice.slot} ${slice.size}`;
      blocks.set(key, [...(blocks.get(key) ?? []), slice]);
    });
    return [...blocks.values()].flatMap((slices) => {
      if (slices.length === 1 || !whole(slices)) return slices;
      return [{ ...slices[0], height: slices.length }];
    });
  }

  function drawTimeline() {
    const step = timelines.steps[select.selectedIndex];
    const box = document.getElementById("timeline");
    const [width, left] = [box.clientWidth, 52];
    const rowPixels = Math.max(7, Math.min(26, 420 / step.ranks.length));
    const panels = step.panels.map((panel) => ({ panel, ...slicesOf(panel, step) }));
    const longest = Math.max(...step.panels.map((panel) => panel.total));
    const costliest = Math.max(...panels.flatMap(({ work }) => work.map((slice) => slice.end - slice.start)));
    const axis = { low: 0, high: longest * step.tick, format: "amount" };
    const toX = scaleOf({ low: 0, high: longest }, left, width - 24);
    const titlePixels = 44;
    const bottom = panels.length * (step.ranks.length * rowPixels + titlePixels);
    box.replaceChildren();
    const svg = add(box, "svg", { width, height: bottom + 24 });
    const hatch = add(add(svg, "defs", {}), "pattern", {
      id: "waiting", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
    });
    add(hatch, "line", { y2: 6, class: "hatch" });
    const texts = new Map();
    drawAxis(svg, axis, scaleOf(axis, left, width - 24), { bottom, top: titlePixels }, width / 110);
    panels.forEach(({ panel, work, waits }, index) => {
      const top = index * (step.ranks.length * rowPixels + titlePixels) + titlePixels;
      add(svg, "text", { class: "title", x: left, y: top - 24 }, TITLES[panel.key]);
      add(svg, "text", { class: "figures", x: left, y: top - 8 }, figuresOf(panel, step));
      step.ranks.forEach((rank, row) => {
        if (row % Math.ceil(14 / rowPixels)) return;
        const label = row ? rank : `rank ${rank}`;
        add(svg, "text", { class: "ytick", x: left - 6, y: top + (row + 0.5) * rowPixels + 4, "text-anchor": "end" }, label);
      });
      const bar = (slice, attributes, lines) => {
        const [x, end] = [toX(slice.start), toX(slice.end)];
        const rows = { y: top + slice.row * rowPixels + 1, height: (slice.height ?? 1) * rowPixels - 2 };
        texts.set(add(svg, "rect", { ...attributes, ...rows, x, width: end - x }), lines);
      };
      const seconds = (slice) => amount((slice.end - slice.start) * step.tick);
      waits.forEach((wait) => bar(wait, { class: "wait" }, () => [`rank ${wait.rank} waits ${seconds(wait)}`]));
      blocksOf(work).forEach((slice) => {
        const part = Math.round((100 * (slice.end - slice.start)) / costliest) || 0;
        const style = `fill: color-mix(in srgb, var(--costly) ${part}%, var(--cheap))`;
        bar(slice, { class: "work", style }, () => about(slice, panel, step));
      });
      const total = toX(panel.total);
      add(svg, "line", { class: `end ${panel.key}`, x1: total, x2: total, y1: top, y2: top + step.ranks.length * rowPixels });
    });
    explain(box, (event) => texts.get(event.target)?.());
    describe(step);
    if (step.forest) drawForest(step.forest);
  }

  // Samples below one another, from their first token to their last; what several share is one block over them.
  function drawForest({ rank, slot, given, computed, nodes }) {
    const box = document.getElementById("forest");
    const [width, left] = [box.clientWidth, 12];
    const rows = Math.max(...nodes.map(([, , row, number]) => row + number));
    const rowPixels = Math.max(5, Math.min(20, 320 / rows));
    const bottom = rows * rowPixels + 8;
    box.replaceChildren();
    const svg = add(box, "svg", { width, height: bottom + 24 });
    const axis = { low: 0, high: Math.max(...nodes.map(([start, tokens]) => start + tokens)), format: "count" };
    const toX = scaleOf(axis, left, width - 24);
    drawAxis(svg, axis, toX, { bottom, top: 8 }, width / 110);
    const texts = new Map();
    nodes.forEach(([start, tokens, row, number]) => {
      const place = { x: toX(start), y: 8 + row * rowPixels, width: toX(start + tokens) - toX(start), height: number * rowPixels - 1 };
      const style = `fill: var(--${number > 1 ? "costly" : "cheap"})`;
      const users = number === 1 ? "1 sample" : `${number} samples, computed once`;
      texts.set(add(svg, "rect", { class: "work", style, ...place }), [`${count(tokens)} tokens of ${users}`]);
    });
    explain(box, (event) => texts.get(event.target));
    document.getElementById("forest-summary").textContent = `Rank ${rank}, micro-batch ${slot}: `
      + `${count(given)} tokens of ${rows} samples, of which ${count(computed)} are computed. Dark: shared.`;
  }

  function figuresOf(panel, step) {
    const waiting = `${(panel.idle * 100).toFixed(1)} % waiting`;
    return `${amount(panel.total * step.tick)}, imbalance ${panel.imbalance.toFixed(3)}, ${waiting}`;
  }

  // The timeline in words and as a table.
  function describe(step) {
    const words = step.panels.map((panel) => `${TITLES[panel.key]}: ${figuresOf(panel, step)}.`);
    document.getElementById("step-summary").textContent = `Step ${count(step.iteration)}. ${words.join(" ")}`;
    const busy = step.panels.map((panel) => {
      const { work } = slicesOf(panel, step);
      const rows = step.ranks.map(() => 0);
      for (const slice of work) rows[slice.row] += slice.end - slice.start;
      return rows;
    });
    const cell = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const head = document.createElement("tr");
    head.append(cell("th", "rank, busy for"), ...step.panels.map((panel) => cell("th", TITLES[panel.key])));
    head.querySelectorAll("th").forEach((heading) => heading.setAttribute("scope", "col"));
    const rows = step.ranks.map((rank, row) => {
      const line = document.createElement("tr");
      const heading = cell("th", String(rank));
      heading.setAttribute("scope", "row");
      line.append(heading, ...busy.map((times) => cell("td", amount(times[row] * step.tick))));
      return line;
    });
    const [thead, tbody] = [document.createElement("thead"), document.createElement("tbody")];
    thead.append(head);
    tbody.append(...rows);
    document.getElementById("step-table").replaceChildren(thead, tbody);
  }

  const previous = document.getElementById("previous");
  const next = document.getElementById("next");

  function show(index) {
    select.selectedIndex = index;
    previous.disabled = index === 0;
    next.disabled = index === timelines.steps.length - 1;
    drawTimeline();
  }

  timelines.steps.forEach((step) => {
    select.append(new Option(`${count(step.iteration)}${step.label ? ` – ${step.label}` : ""}`));
  });
  select.addEventListener("change", () => show(select.selectedIndex));
  previous.addEventListener("click", () => show(select.selectedIndex - 1));
  next.addEventListener("click", () => show(select.selectedIndex + 1));

  for (const button of document.querySelectorAll("[data-copies]")) {
    const name = button.textContent;
    button.addEventListener("click", () => {
      // The newer clipboard is not there for every page that is opened as a file.
      window.getSelection().selectAllChildren(document.getElementById(button.dataset.copies));
      button.textContent = document.execCommand("copy") ? "Copied" : name;
    });
  }

  function drawAll() {
    show(select.selectedIndex);
    drawImbalance(imbalance);
  }

  select.selectedIndex = timelines.first;
  window.addEventListener("resize", drawAll);
  drawAll();
  document.documentElement.dataset.drawn = String(Math.round(performance.now()));
})();
