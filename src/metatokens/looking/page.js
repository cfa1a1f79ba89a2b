// The page of `metatokens look`: three choices (layer, head, position), from which Plotly draws everything.
const chosen = {layer: 0, head: 0, position: 0};  // head 0 is the mean of all
// The only button of a figure, shown while the mouse is over it, saves it for a paper.
const OPTIONS = {responsive: true, displaylogo: false, modeBarButtons: [["toImage"]], toImageButtonOptions: {format: "svg", filename: "look"}};
// Colours follow the square root, so that small weights show.
const COLOURS = {
  colorscale: SCALE, zmin: 0, zmax: 1,
  colorbar: {thickness: 10, len: 0.9, outlinewidth: 0, tickvals: [0, 0.1, 0.25, 0.5, 1].map(Math.sqrt), ticktext: ["0", ".1", ".25", ".5", "1"]},
};
const FEW = 24;  // tokens that have room at the side of a map

const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};

const read = async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
};

// A map's bytes are 255 times the square roots of its weights.
const unpack = (text, width) => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), rows = [];
  for (let start = 0; start < bytes.length; start += width)
    rows.push(Array.from(bytes.subarray(start, start + width), byte => (byte / 255) ** 2));
  return rows;
};

// The share of each cell that the query has forgotten; undefined if it has forgotten nothing.
const forgotten = (part, width) => part.forgotten ? unpack(part.forgotten, width) : undefined;

const label = (model, position) => `${position} ${model.isMeta[position] ? "◆" : model.tokens[position]}`;

const cells = (model, part) => {  // the positions in each row and column of a map
  const starts = part.positions.filter((_, index) => index % part.step === 0);
  return part.step === 1
    ? starts.map(position => label(model, position))
    : starts.map((position, index) => {
        const last = part.positions[Math.min((index + 1) * part.step, part.positions.length) - 1];
        return `${position}–${last}`;
      });
};

const layout = (x, y, height) => ({
  height, margin: {l: 48, r: 8, t: 8, b: 40}, font: {size: 12},
  xaxis: {title: {text: x}}, yaxis: {title: {text: y}}, hoverlabel: {align: "left"}, showlegend: false,
});

const row = part => part.positions.findIndex(position => position === chosen.position);

const drawMap = (view, module, plot) => {
  const part = module.layers[chosen.layer], {model} = view;
  plot.parentElement.hidden = !part;
  if (!part) return;
  const names = cells(model, part), weights = unpack(part.maps[Math.min(chosen.head, part.maps.length - 1)], names.length);
  const around = row(part) < 0 ? [] : [Math.floor(row(part) / part.step)];
  const shapes = around.map(y => ({
    type: "rect", x0: -0.5, x1: names.length - 0.5, y0: y - 0.5, y1: y + 0.5, line: {color: "#d55e00", width: 1.5},
  }));
  const gone = forgotten(part, names.length);
  const trace = {
    type: "heatmap", ...COLOURS, z: weights.map((line, y) => line.map((weight, x) => gone?.[y][x] > 0.5 ? null : Math.sqrt(weight))),
    customdata: weights.map((line, y) => line.map((weight, x) => [names[y], names[x], weight])),
    hovertemplate: "query %{customdata[0]}<br>key %{customdata[1]}<br>weight %{customdata[2]:.3f}<extra></extra>",
  };
  const look = layout("key", "query", Math.min(plot.clientWidth || 400, 460, 120 + 20 * names.length));
  look.yaxis.autorange = "reversed";
  // The number of a cell is a position only if each token has a cell. Otherwise the axes name some positions.
  const every = names.length <= FEW ? 1 : Math.ceil(names.length / 6);
  if (every === 1 || part.step > 1 || part.positions.length < model.tokens.length) {
    const tickvals = names.map((_, index) => index).filter(index => index % every === 0);
    const ticktext = tickvals.map(index => String(part.positions[index * part.step]));
    for (const axis of [look.xaxis, look.yaxis]) Object.assign(axis, {tickvals, ticktext});
  }
  plot.previousSibling.textContent = `${module.title}: weights` + (part.step > 1 ? `, a cell for ${part.step} tokens` : "");
  Plotly.react(plot, [trace], {...look, shapes, plot_bgcolor: gone ? "#d9d6d0" : "#fff"}, OPTIONS);
};

const drawLens = (view, plot) => {
  const {model} = view, {tokens, probabilities} = model.lens;
  const told = tokens.map((line, layer) => line.map((words, position) => words.map(
    (word, rank) => `${word.replace(/&/g, "&amp;").replace(/</g, "&lt;")} ${probabilities[layer][position][rank].toFixed(3)}`
  ).join("<br>")));
  const trace = {
    type: "heatmap", ...COLOURS, z: probabilities.map(line => line.map(ps => Math.sqrt(ps[0]))),
    text: told, customdata: told.map((line, layer) => line.map((_, position) => [layer, label(model, position)])),
    hovertemplate: "after %{customdata[0]} layers, at %{customdata[1]}<br>%{text}<extra></extra>",
  };
  const look = layout("position", "layers", 120 + 22 * tokens.length);
  look.shapes = [{
    type: "rect", x0: chosen.position - 0.5, x1: chosen.position + 0.5, y0: -0.5, y1: tokens.length - 0.5,
    line: {color: "#d55e00", width: 1.5},
  }];
  Plotly.react(plot, [trace], look, OPTIONS);
};

const drawEntropy = (view, module, plot) => {
  const part = module.layers[chosen.layer];
  plot.parentElement.hidden = !part;
  if (!part) return;
  const lines = {kept: ["as it is", "#d55e00", "solid"], zeroed: ["embedding of meta-tokens zero", "#0072b2", "dash"]};
  const traces = Object.entries(part.entropy).map(([key, rows]) => ({
    x: part.positions, y: rows[Math.min(chosen.head, rows.length - 1)], name: lines[key][0], mode: part.positions.length > FEW ? "lines" : "lines+markers",
    line: {color: lines[key][1], dash: lines[key][2], width: 1.5},
  }));
  const look = layout("position", "entropy, nats", 240);
  Plotly.react(plot, traces, {...look, showlegend: true, legend: {orientation: "h", y: 1.2}}, OPTIONS);
};

const shade = view => {
  const part = view.model.modules[0].layers[chosen.layer], weight = new Map(), gone = new Set();
  const index = part ? row(part) : -1;  // a model may have fewer layers than another on the page
  if (index >= 0) {  // the weight of a cell is the sum over its tokens
    const {step, positions} = part, width = Math.ceil(positions.length / step);
    const weights = unpack(part.maps[Math.min(chosen.head, part.maps.length - 1)], width)[Math.floor(index / step)];
    const hidden = forgotten(part, width)?.[Math.floor(index / step)];
    positions.forEach((position, key) => {
      const cell = Math.floor(key / step), tokens = Math.min(step, positions.length - step * cell);
      weight.set(position, weights[cell] / tokens);
      if (hidden?.[cell] > 0.5) gone.add(position);
    });
  }
  view.buttons.forEach((button, position) => {
    const is = position === chosen.position;
    button.setAttribute("aria-pressed", is);
    button.tabIndex = is ? 0 : -1;
    button.classList.toggle("forgotten", gone.has(position));
    const strength = Math.sqrt(weight.get(position) || 0);
    button.style.background = strength > 0.03 ? `rgba(0, 114, 178, ${(0.75 * strength).toFixed(3)})` : "";
  });
};

const told = view => {
  const {tokens, probabilities} = view.model.lens, last = tokens.length - 1, position = chosen.position;
  if (position >= tokens[last].length) return "";
  const next = tokens[last][position].map((word, rank) => `${word} ${probabilities[last][position][rank].toFixed(3)}`);
  return `Position ${label(view.model, position)}. Next: ${next.slice(0, 3).join(", ")}`;
};

const draw = views => {
  for (const view of views) {
    shade(view);
    for (const [module, map, entropy] of view.parts) {
      drawMap(view, module, map);
      drawEntropy(view, module, entropy);
    }
    drawLens(view, view.lens);
    view.state.textContent = told(view);
  }
};

const choices = (id, names, key, redraw) => {
  const field = document.getElementById(id);
  names.forEach(([name, value]) => {
    const input = element("input", {type: "radio", name: id, checked: chosen[key] === value});
    input.addEventListener("change", () => { chosen[key] = value; redraw(); });
    field.append(element("label", {}, input, name));
  });
};

const figure = (title, plots) => {
  const plot = element("div", {className: "plot"});
  plots.push(plot);
  return element("figure", {}, element("figcaption", {textContent: title}), plot);
};

const build = (model, choose) => {
  const view = {model, parts: [], buttons: []}, plots = [];
  const strip = element("div", {className: "tokens", role: "group", ariaLabel: `The prompt of ${model.name}`});
  model.tokens.forEach((token, position) => {
    const is = model.isMeta[position];
    const button = element("button", {
      type: "button", textContent: is ? "◆" : token, className: is ? "meta" : "", title: label(model, position),
      ariaLabel: is ? `position ${position}, meta-token` : `position ${position}, ${token}`,
    });
    button.addEventListener("click", () => choose(position));
    view.buttons.push(button);
    strip.append(button);
  });
  strip.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    const next = step && chosen.position + step;
    if (!step || next < 0 || next >= view.buttons.length) return;
    event.preventDefault();
    choose(next);
    view.buttons[next].focus();
  });
  view.state = element("p", {className: "note state", role: "status"});
  const figures = element("div", {className: "figures"});
  const section = element("section", {ariaLabel: model.name}, element("h3", {textContent: model.name}), strip, view.state, figures);
  for (const module of model.modules) figures.append(figure(`${module.title}: weights`, plots));
  for (const module of model.modules) figures.append(figure(`${module.title}: entropy of each row`, plots));
  const count = model.modules.length;
  section.append(figure("Logit lens: probability of the likeliest token if each layer were the last", plots));
  view.parts = model.modules.map((module, index) => [module, plots[index], plots[count + index]]);
  view.lens = plots[2 * count];
  view.listen = () => {
    for (const [module, map] of view.parts) {
      if (!map.on) Plotly.newPlot(map, []);  // not drawn yet, in a model with fewer layers
      map.on("plotly_click", ({points: [point]}) => {
        const part = module.layers[chosen.layer];
        choose(part.positions[Math.min(point.pointIndex[0] * part.step, part.positions.length - 1)]);
      });
    }
    view.lens.on("plotly_click", ({points: [point]}) => choose(point.pointIndex[1]));
  };
  document.getElementById("models").append(section);
  return view;
};

(async () => {
  const models = await read();
  const choose = position => { chosen.position = position; draw(views); };
  const layers = [...new Set(models.flatMap(model => model.modules.flatMap(module => Object.keys(module.layers).map(Number))))];
  const heads = Math.max(...models.flatMap(model => model.modules.flatMap(
    module => Object.values(module.layers).map(part => part.maps.length - 1))));
  chosen.layer = Math.max(...layers);
  const metas = models[0].isMeta.lastIndexOf(true);
  chosen.position = metas < 0 ? models[0].tokens.length - 1 : metas;
  const views = models.map(model => build(model, choose));
  choices("layers", layers.sort((a, b) => a - b).map(layer => [String(layer), layer]), "layer", () => draw(views));
  choices("heads", [["mean", 0], ...Array.from({length: heads}, (_, head) => [String(head), head + 1])], "head", () => draw(views));
  draw(views);
  views.forEach(view => view.listen());
  document.body.dataset.ready = "yes";
})();
