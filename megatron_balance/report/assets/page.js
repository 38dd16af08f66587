"use strict";
// Draws the charts in the reader's theme, and the timelines of one step from compact numbers.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const themes = read("themes");
  const timelines = read("timelines");
  const figures = read("figures");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 560px)");
  const select = document.getElementById("step");
  const MAX_SAMPLES = 12; // that a tooltip lists

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function themed(layout) {
    const axis = (own) => ({ automargin: true, ...own });
    const result = {
      template: dark.matches ? themes.dark : themes.white,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13 }, hoverlabel: { align: "left" },
      margin: { l: 56, r: 12, t: 36, b: 44 }, hovermode: "closest", dragmode: narrow.matches ? false : "zoom",
      ...layout,
    };
    for (const key of Object.keys(result)) {
      if (/^[xy]axis/.test(key)) result[key] = axis(result[key]);
    }
    return result;
  }

  const config = { responsive: true, displayModeBar: false };

  function drawCharts() {
    return figures.map(({ name, figure: { data, layout } }) => {
      const { template, ...own } = structuredClone(layout);
      return Plotly.react(name, structuredClone(data), themed(own), config);
    });
  }

  const count = (value) => value.toLocaleString("en-US");
  const PREFIXES = { "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E", 21: "Z" };

  function amount(value) {
    if (timelines.unit === "tokens") return `${count(Math.round(value))} tokens`;
    if (!value) return `0 ${timelines.unit}`;
    const highest = timelines.unit === "s" ? 0 : 21;
    const power = Math.min(Math.max(3 * Math.floor(Math.log10(value) / 3), -9), highest);
    return `${Number((value / 10 ** power).toPrecision(3))} ${PREFIXES[power]}${timelines.unit}`;
  }

  // The micro-batches of a timeline, as rows of bars, and the waiting between them.
  function slicesOf(panel, step) {
    const work = [];
    const waits = [];
    let sample = 0;
    step.ranks.forEach((rank, row) => {
      let free = 0;
      for (let slot = 0; slot < panel.slots; slot += 1) {
        const place = row * panel.slots + slot;
        const [start, end] = [panel.starts[place], panel.ends[place]];
        const ids = panel.ids.slice(sample, sample + panel.counts[place]);
        sample += ids.length;
        const size = panel.sizes.length ? panel.sizes[place] : 1;
        if (!size) continue; // a leaf without this slot
        if (start > free) waits.push({ row, rank, start: free, end: start });
        work.push({ row, rank, slot, start, end, ids, size });
        free = Math.max(free, end);
      }
      if (panel.total > free) waits.push({ row, rank, start: free, end: panel.total });
    });
    return { work, waits };
  }

  function about(slice, panel, step) {
    const { lengths } = step;
    const time = `${amount((slice.end - slice.start) * step.tick)}${panel.key === "measured" ? "" : " predicted"}`;
    const first = slice.rank - (slice.rank % slice.size);
    const ranks = slice.size > 1 ? `ranks ${first} to ${first + slice.size - 1}` : `rank ${slice.rank}`;
    const size = panel.sizes.length ? `, CP ${slice.size}` : "";
    const head = `<b>${ranks}, micro-batch ${slice.slot}${size}</b><br>${time}`;
    if (!slice.ids.length) return `${head}<br>no samples: a masked dummy`;
    const tokens = slice.ids.reduce((sum, id) => sum + lengths[id], 0);
    const shown = slice.ids.slice(0, MAX_SAMPLES).map((id) => `sample ${id}: ${count(lengths[id])}`);
    if (slice.ids.length > MAX_SAMPLES) shown.push(`and ${slice.ids.length - MAX_SAMPLES} more`);
    const samples = slice.ids.length === 1 ? "1 sample" : `${slice.ids.length} samples`;
    return `${head}<br>${samples}, ${count(tokens)} tokens<br>${shown.join("<br>")}`;
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

  function bars(slices, step, axes) {
    return {
      type: "bar", orientation: "h", showlegend: false, ...axes,
      width: slices.map((slice) => (slice.height ?? 1) - 0.12),
      y: slices.map((slice) => slice.row + ((slice.height ?? 1) - 1) / 2),
      base: slices.map((slice) => slice.start * step.tick),
      x: slices.map((slice) => (slice.end - slice.start) * step.tick),
    };
  }

  function drawTimeline() {
    const step = timelines.steps[select.selectedIndex];
    const numRows = step.ranks.length;
    const rowPixels = Math.max(7, Math.min(26, 420 / numRows));
    const panelPixels = numRows * rowPixels;
    const titlePixels = narrow.matches ? 40 : 26;
    const gapPixels = titlePixels + 14;
    const numPanels = step.panels.length;
    const inner = numPanels * panelPixels + (numPanels - 1) * gapPixels;
    const margin = { l: 48, r: narrow.matches ? 12 : 96, t: titlePixels + 8, b: 46 };
    const longest = Math.max(...step.panels.map((panel) => panel.total)) * step.tick;
    const data = [];
    const layout = {
      height: inner + margin.t + margin.b, margin, barmode: "overlay", bargap: 0, annotations: [], shapes: [],
      coloraxis: {
        cmin: 0, colorscale: [[0, colour("cheap")], [1, colour("costly")]], showscale: !narrow.matches,
        colorbar: {
          title: { text: "micro-batch", side: "top" }, thickness: 12, outlinewidth: 0, tickformat: "~s",
          ticksuffix: timelines.unit === "s" ? "s" : "", len: Math.min(1, 260 / inner), y: 1, yanchor: "top",
        },
      },
      xaxis: {
        range: [0, longest * 1.002], tickformat: "~s", ticksuffix: timelines.unit === "s" ? "s" : "",
        title: { text: timelines.unit === "s" ? "time" : timelines.unit }, anchor: `y${numPanels > 1 ? numPanels : ""}`,
        zeroline: false, nticks: narrow.matches ? 4 : 10,
      },
    };
    let costliest = 0;
    step.panels.forEach((panel, index) => {
      const suffix = index ? String(index + 1) : "";
      const top = 1 - (index * (panelPixels + gapPixels)) / inner;
      const axes = { xaxis: "x", yaxis: `y${suffix}` };
      const { work: ofRanks, waits } = slicesOf(panel, step);
      const work = blocksOf(ofRanks);
      const every = Math.ceil(14 / rowPixels);
      const ticks = step.ranks.map((_, row) => row).filter((row) => row % every === 0);
      layout[`yaxis${suffix}`] = {
        domain: [Math.max(0, top - panelPixels / inner), top], range: [numRows - 0.5, -0.5], fixedrange: true,
        showgrid: false, zeroline: false, tickvals: ticks, ticktext: ticks.map((row) => step.ranks[row]),
        title: { text: "rank", standoff: 4 },
      };
      const times = work.map((slice) => (slice.end - slice.start) * step.tick);
      costliest = Math.max(costliest, ...times);
      data.push({
        ...bars(waits, step, axes), name: "waiting",
        marker: {
          color: colour("surface"), line: { width: 0 },
          pattern: { shape: "/", fgcolor: colour("muted"), bgcolor: colour("page"), size: 6, solidity: 0.22 },
        },
        hovertext: waits.map((wait) => `rank ${wait.rank} waits ${amount((wait.end - wait.start) * step.tick)}`),
        hovertemplate: "%{hovertext}<extra></extra>",
      });
      data.push({
        ...bars(work, step, axes), name: panel.title,
        marker: { color: times, coloraxis: "coloraxis", line: { width: 0.6, color: colour("page") } },
        hovertext: work.map((slice) => about(slice, panel, step)),
        hovertemplate: "%{hovertext}<extra></extra>",
      });
      const end = panel.total * step.tick;
      layout.annotations.push({
        text: `<b>${panel.title}</b>${narrow.matches ? "<br>" : "   "}${figuresOf(panel, step)}`, align: "left",
        xref: "paper", x: 0, xanchor: "left", yref: "paper", y: top, yanchor: "bottom", showarrow: false, yshift: 2,
      });
      layout.shapes.push({
        type: "line", xref: "x", x0: end, x1: end, yref: `y${suffix} domain`, y0: 0, y1: 1,
        line: { color: panel.colour, width: 2 },
      });
    });
    layout.coloraxis.cmax = costliest;
    document.getElementById("timeline").style.height = `${layout.height}px`;
    describe(step);
    return Plotly.react("timeline", data, themed(layout), config);
  }

  function figuresOf(panel, step) {
    const waiting = `${(panel.idle * 100).toFixed(1)} % waiting`;
    return `${amount(panel.total * step.tick)}, imbalance ${panel.imbalance.toFixed(3)}, ${waiting}`;
  }

  // The timeline in words and as a table.
  function describe(step) {
    const words = step.panels.map((panel) => `${panel.title}: ${figuresOf(panel, step)}.`);
    document.getElementById("step-summary").textContent = `Step ${count(step.iteration)}. ${words.join(" ")}`;
    const busy = step.panels.map((panel) => {
      const { work } = slicesOf(panel, step);
      const rows = step.ranks.map(() => 0);
      for (const slice of work) rows[slice.row] += slice.end - slice.start;
      return rows;
    });
    const cell = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const head = document.createElement("tr");
    head.append(cell("th", "rank, busy for"), ...step.panels.map((panel) => cell("th", panel.title)));
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
    return drawTimeline();
  }

  timelines.steps.forEach((step) => {
    select.append(new Option(`${count(step.iteration)}${step.label ? ` – ${step.label}` : ""}`));
  });
  select.addEventListener("change", () => show(select.selectedIndex));
  previous.addEventListener("click", () => show(select.selectedIndex - 1));
  next.addEventListener("click", () => show(select.selectedIndex + 1));

  function drawAll() {
    return Promise.all([show(select.selectedIndex), ...drawCharts()]);
  }

  select.selectedIndex = timelines.first;
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll().then(() => {
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  });
})();
