"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("js");

  const SVG = "http://www.w3.org/2000/svg";
  const BELOW = 255;

  /* Elements from names, attributes and children. Texts are text nodes: nothing here is parsed as markup. */
  const fill = (node, attributes, children) => {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  const percent = (share) => `${(100 * share).toFixed(2)}%`;
  const exponent = (value) => value.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2");
  const clip = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);
  const bytes = (count) => `${count.toLocaleString("en")} B`;

  /* Columns of numbers, little-endian, as loraforge.report.text.packed writes them. */
  const unpack = ({ type, data: text }) => {
    const raw = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    if (type === "u1") return raw;
    const view = new DataView(raw.buffer);
    const [size, read, Kind] = {
      u2: [2, (at) => view.getUint16(at, true), Uint16Array],
      u4: [4, (at) => view.getUint32(at, true), Uint32Array],
      f4: [4, (at) => view.getFloat32(at, true), Float32Array],
    }[type];
    return Kind.from({ length: raw.length / size }, (_, index) => read(index * size));
  };

  /* Every table sorts by its data-v where a cell has one, by its text otherwise; a detail row follows its owner. */
  const sortable = (table) => {
    const body = table.tBodies[0];
    const number = (row, column) => {
      const value = row.cells[column].dataset.v;
      return value === undefined ? null : Number(value);
    };
    const order = new Intl.Collator("en", { numeric: true });
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = html("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const first = head.classList.contains("n") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const direction = head.getAttribute("aria-sort") === first ? other : first;
        for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction);
        const sign = direction === "ascending" ? 1 : -1;
        const rows = [...body.rows].filter((row) => !row.classList.contains("detail"));
        rows.sort((one, two) => {
          const a = number(one, column);
          const b = number(two, column);
          const compared = a === null || b === null
            ? order.compare(one.cells[column].textContent, two.cells[column].textContent)
            : a - b;
          return sign * compared || one.dataset.i - two.dataset.i;
        });
        body.append(...rows.flatMap((row) => (row.owned ? [row, row.owned] : [row])));
      });
    });
  };

  /* Where each adapter's modules and levels begin. */
  const detailed = data.lists !== undefined;
  const columns = {};
  const starts = [];
  if (detailed) {
    for (const key of ["k", "r", "lost", "rounding", "first", "path", "levels"]) columns[key] = unpack(data[key]);
    let module = 0;
    let level = 0;
    for (const [list] of data.adapters) {
      starts.push([module, level]);
      for (const end = module + data.lists[list].names.length; module < end; module += 1) level += stored(module);
    }
  }
  function stored(module) {
    const rank = columns.r[module];
    return data.points === 0 ? rank : Math.min(rank, data.points);
  }

  const modulesOf = (adapter) => {
    const list = data.lists[data.adapters[adapter][0]];
    let [at, level] = starts[adapter];
    return list.names.map((name, index) => {
      const rank = columns.r[at];
      const count = stored(at);
      const found = {
        name,
        kind: list.kinds[index],
        layer: list.layers[index],
        shape: list.shapes[index],
        rank,
        kept: columns.k[at],
        lost: columns.lost[at],
        rounding: columns.rounding[at],
        first: columns.first[at],
        path: data.paths[columns.path[at]],
        spectrum: Array.from({ length: count }, (_, place) => ({
          direction: 1 + (count === rank ? place : Math.floor((place * (rank - 1)) / (count - 1))),
          level: columns.levels[level + place],
        })),
      };
      at += 1;
      level += count;
      return found;
    });
  };

  /* Singular values of every module of one adapter, absolute and on a logarithmic axis; what is dropped is faint. */
  const spectra = (modules) => {
    const value = ({ first }, level) => (level === BELOW ? 0 : first * 10 ** ((-data.decades * level) / (BELOW - 1)));
    const all = modules.flatMap((module) => module.spectrum.map(({ level }) => value(module, level))).filter((v) => v > 0);
    const top = Math.ceil(Math.log10(all.reduce((a, b) => Math.max(a, b), 1e-300)));
    const least = Math.floor(Math.log10(all.reduce((a, b) => Math.min(a, b), 1e300)));
    const bottom = Math.min(top - 1, Math.max(least, top - 5));
    const reach = modules.reduce((most, { rank }) => Math.max(most, rank), 1);
    const [left, right, head, foot] = [54, 548, 10, 262];
    const x = (direction) => (reach === 1 ? (left + right) / 2 : left + ((right - left) * Math.log(direction)) / Math.log(reach));
    const y = (v) => head + ((foot - head) * (top - Math.max(bottom, v > 0 ? Math.log10(v) : bottom))) / (top - bottom);
    const chart = svg("svg", { class: "chart", role: "img", viewBox: "0 0 700 306",
      "aria-label": "Singular values of every module by direction; the table has the ranks that are kept" });
    for (let decade = bottom; decade <= top; decade += 1) {
      const at = y(10 ** decade);
      chart.append(
        svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
        svg("text", { class: "muted", x: left - 8, y: at + 4, "text-anchor": "end" },
          "10", svg("tspan", { class: "sup", dy: -5 }, String(decade).replace("-", "−"))),
      );
    }
    for (let direction = 1; direction <= reach; direction *= 2) {
      chart.append(svg("text", { class: "muted", x: x(direction), y: foot + 18, "text-anchor": "middle" }, String(direction)));
    }
    chart.append(svg("text", { class: "muted", x: (left + right) / 2, y: foot + 38, "text-anchor": "middle" }, "direction"));
    const lines = modules.map((module) => {
      const points = module.spectrum.map(({ direction, level }) => [direction, `${x(direction).toFixed(1)},${y(value(module, level)).toFixed(1)}`]);
      const kept = points.filter(([direction]) => direction <= module.kept);
      const cut = points.slice(Math.max(0, kept.length - 1));
      const line = (part, style) => svg("polyline", { class: style, points: part.map(([, point]) => point).join(" ") });
      const end = kept.length ? kept[kept.length - 1][1].split(",") : null;
      const group = svg("g", { class: `k${module.kind}` }, line(cut, "cut"), line(kept, "thin"),
        ...(end ? [svg("circle", { cx: end[0], cy: end[1], r: 2 })] : []), svg("title", {}, `${module.name}: ${module.kept} of ${module.rank}`));
      chart.append(group);
      return group;
    });
    const used = [...new Set(modules.map(({ kind }) => kind))].sort((a, b) => a - b);
    used.forEach((kind, row) => {
      const at = head + 10 + 20 * row;
      chart.append(
        svg("g", { class: `k${kind}` }, svg("line", { class: "key", x1: right + 16, x2: right + 36, y1: at, y2: at })),
        svg("text", { x: right + 42, y: at + 4 }, clip(data.kinds[kind], 14)),
      );
    });
    return { chart, lines, used };
  };

  /* The rank that each module keeps, shaded by its share of the whole: layers from left to right, kinds from top to bottom. */
  const map = (modules) => {
    const placed = modules.filter(({ layer }) => layer !== null);
    const layers = [...new Set(placed.map(({ layer }) => layer))].sort((a, b) => a - b);
    const kinds = [...new Set(placed.map(({ kind }) => kind))].sort((a, b) => a - b);
    if (layers.length < 2 || layers.length > 200) return null;
    const [left, width, height] = [110, 580 / layers.length, 22];
    const foot = 6 + kinds.length * height;
    const most = placed.reduce((share, { kept, rank }) => Math.max(share, kept / rank), 0);
    const chart = svg("svg", { class: "chart", role: "img", viewBox: `0 0 700 ${foot + 40}`,
      "aria-label": "Rank that each module keeps, by layer and kind; the table has the numbers" });
    kinds.forEach((kind, row) => chart.append(
      svg("text", { x: left - 8, y: 6 + row * height + 15, "text-anchor": "end" }, clip(data.kinds[kind], 15))));
    for (const module of placed) {
      const shade = most ? module.kept / module.rank / most : 0;
      const place = { x: left + layers.indexOf(module.layer) * width, y: 6 + kinds.indexOf(module.kind) * height,
        width: Math.max(1, width - 1), height: height - 1 };
      chart.append(
        svg("rect", { ...place, class: "frame" }),
        svg("rect", { ...place, class: "heat", "fill-opacity": shade.toFixed(3) },
          svg("title", {}, `${module.name}: ${module.kept} of ${module.rank}, energy kept ${percent(1 - module.lost ** 2)}`)),
      );
      if (width >= 8 + 6 * String(module.kept).length) {
        chart.append(svg("text", { class: shade > 0.6 ? "rank on" : "rank", x: place.x + place.width / 2, y: place.y + 14.5,
          "text-anchor": "middle" }, String(module.kept)));
      }
    }
    const step = Math.max(1, Math.round(layers.length / 10));
    for (let index = 0; index < layers.length; index += step) {
      chart.append(svg("text", { class: "muted", x: left + (index + 0.5) * width, y: foot + 16, "text-anchor": "middle" },
        String(layers[index])));
    }
    chart.append(svg("text", { class: "muted", x: left + 290, y: foot + 34, "text-anchor": "middle" }, "layer"));
    return chart;
  };

  const moduleTable = (modules, lines) => {
    const heads = [["Module"], ["In × out", "n"], ["Rank", "n"], ["Kept", "n"], ["Energy kept", "n"], ["Truncation", "n"],
      ["Rounding", "n"], ["Largest value", "n"], ["Path"]];
    const body = html("tbody");
    modules.forEach((module, index) => {
      const energy = 1 - module.lost ** 2;
      const numbers = [
        [module.shape[0] * module.shape[1], module.shape[0] ? `${module.shape[0]} × ${module.shape[1]}` : "–"],
        [module.rank, module.rank], [module.kept, module.kept], [energy, percent(energy)], [module.lost, module.lost.toFixed(4)],
        [module.rounding, exponent(module.rounding)], [module.first, module.first.toPrecision(3)],
      ];
      const row = html("tr", { "data-i": index }, html("th", { scope: "row" }, html("bdi", {}, module.name)),
        ...numbers.map(([value, text]) => html("td", { class: "n", "data-v": value }, String(text))), html("td", {}, module.path));
      const hot = (on) => lines[index].querySelectorAll("polyline").forEach((line) => line.classList.toggle("hot", on));
      row.addEventListener("mouseenter", () => hot(true));
      row.addEventListener("mouseleave", () => hot(false));
      body.append(row);
    });
    const head = html("thead", {}, html("tr", {}, ...heads.map(([text, kind]) =>
      html("th", kind ? { scope: "col", class: kind } : { scope: "col" }, text))));
    const table = html("table", {}, head, body);
    sortable(table);
    return table;
  };

  const hashes = (adapter) => {
    const [, original, size, key, passed, weights] = data.adapters[adapter];
    const rows = [
      [`Original weights, ${bytes(size)}`, original],
      ...weights.map(([layout, rank, count, sha256]) => [`${layout}, r ${rank}, ${bytes(count)}`, sha256]),
      ["Key of its factors", key],
    ];
    if (passed) rows.push(["Tensors copied as they are", String(passed)]);
    return html("table", { class: "facts" }, html("tbody", {}, ...rows.map(([title, text]) =>
      html("tr", {}, html("th", { scope: "row" }, title), html("td", {}, html("code", {}, text))))));
  };

  const detail = (adapter, name, span) => {
    const cell = html("div", { class: "inside" });
    if (detailed) {
      const modules = modulesOf(adapter);
      const { chart, lines, used } = spectra(modules);
      const select = html("select", {}, html("option", { value: "" }, "all kinds"),
        ...used.map((kind) => html("option", { value: kind }, data.kinds[kind])));
      const table = moduleTable(modules, lines);
      const search = html("input", { type: "search", autocomplete: "off", spellcheck: "false" });
      const narrow = () => {
        const words = search.value.toLowerCase();
        for (const row of table.tBodies[0].rows) {
          const { name: module, kind } = modules[row.dataset.i];
          row.hidden = !(module.toLowerCase().includes(words) && (select.value === "" || Number(select.value) === kind));
        }
        modules.forEach(({ name: module, kind }, index) => {
          const on = module.toLowerCase().includes(words) && (select.value === "" || Number(select.value) === kind);
          lines[index].setAttribute("visibility", on ? "visible" : "hidden");
        });
      };
      search.addEventListener("input", narrow);
      select.addEventListener("change", narrow);
      const drawn = map(modules);
      const pair = html("div", { class: "pair" }, html("div", {}, html("h3", {}, "Singular values; faint where they are dropped"),
        html("figure", {}, chart)));
      if (drawn) pair.append(html("div", {}, html("h3", {}, "Ranks that are kept; shaded by their share of the whole"), html("figure", {}, drawn)));
      cell.append(pair,
        html("div", { class: "controls" }, html("label", {}, "Module contains ", search), html("label", {}, "Kind ", select)),
        html("div", { class: "modules", role: "region", tabindex: 0, "aria-label": `Table of the modules of ${name}` }, table));
    } else {
      cell.append(html("p", {}, "This fleet has too many modules for one page; manifest.json has them."));
    }
    cell.append(html("h3", {}, "Hashes (SHA-256)"), hashes(adapter));
    return html("td", { colspan: span }, cell);
  };

  const table = document.getElementById("table");
  const span = table.tHead.rows[0].cells.length;
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) {
    const head = row.cells[0];
    const name = head.textContent;
    const id = `modules-${row.dataset.i}`;
    const button = html("button", { type: "button", class: "open", "aria-expanded": "false" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      if (!row.owned) {
        row.owned = html("tr", { class: "detail", id, hidden: "" }, detail(Number(row.dataset.i), name, span));
        button.setAttribute("aria-controls", id);
        row.after(row.owned);
      }
      const open = row.owned.hidden;
      row.owned.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
    });
  }
  sortable(table);

  const controls = document.getElementById("controls");
  const words = document.getElementById("filter-name");
  const energy = document.getElementById("filter-energy");
  const output = document.getElementById("shown");
  const energyColumn = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent === "Energy kept");
  const narrow = () => {
    const text = words.value.toLowerCase();
    const limit = energy.value === "" ? Infinity : Number(energy.value) / 100;
    let count = 0;
    for (const row of rows) {
      const on = row.cells[0].textContent.toLowerCase().includes(text) && Number(row.cells[energyColumn].dataset.v) < limit;
      row.hidden = !on;
      if (row.owned) row.owned.hidden = !on || row.querySelector(".open").getAttribute("aria-expanded") !== "true";
      count += on;
    }
    output.textContent = `${count} of ${rows.length} adapters`;
  };
  controls.hidden = false;
  controls.addEventListener("input", narrow);
  controls.addEventListener("submit", (event) => event.preventDefault());
  narrow();
})();
