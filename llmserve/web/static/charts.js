// Three kinds of pictures on a canvas: lines over time, dots, and bars of requests in lanes.

const LEFT = 52, RIGHT = 8, TOP = 6, BOTTOM = 18;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

export function shown(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "") || "0";
}

// The largest value of an axis: 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value)), part = value / power;
  return power * (part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 5 : 10);
}

// series: [[color, [value or null, ...]], ...], the last value is the newest; one value a second
export function lines(canvas, series, seconds) {
  const { context, width, height } = prepare(canvas);
  const most = roundUp(Math.max(1e-3, ...series.flatMap(([, values]) => values.filter((value) => value !== null))));
  const x = (age) => width - RIGHT - (age / seconds) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - (value / most) * (height - TOP - BOTTOM);
  context.strokeStyle = color("line");
  context.fillStyle = color("faint");
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    context.beginPath();
    context.moveTo(LEFT, y(share * most));
    context.lineTo(width - RIGHT, y(share * most));
    context.stroke();
    context.textAlign = "right";
    context.fillText(shown(share * most), LEFT - 6, y(share * most));
  }
  context.textAlign = "left";
  context.fillText(seconds > 60 ? `${seconds / 60} minutes ago` : "1 minute ago", LEFT, height - 7);
  context.textAlign = "right";
  context.fillText("now", width - RIGHT, height - 7);
  context.lineWidth = 1.6;
  for (const [name, values] of series) {
    context.strokeStyle = color(name);
    context.beginPath();
    let drawing = false;
    values.forEach((value, index) => {
      if (value === null) { drawing = false; return; }
      const at = [x(values.length - 1 - index), y(value)];
      if (drawing) context.lineTo(...at); else context.moveTo(...at);
      drawing = true;
    });
    context.stroke();
  }
}

// points: [[forecast, real], ...], both axes logarithmic
export function dots(canvas, points) {
  const { context, width, height } = prepare(canvas);
  const most = roundUp(Math.max(100, ...points.flat())), decades = Math.log10(most);
  const share = (value) => Math.log10(Math.max(1, value)) / decades;
  const x = (value) => LEFT + share(value) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - share(value) * (height - TOP - BOTTOM);
  context.strokeStyle = color("line");
  context.fillStyle = color("faint");
  context.textBaseline = "middle";
  for (let value = 1; value <= most; value *= 10) {
    context.textAlign = "right";
    context.fillText(shown(value), LEFT - 6, y(value));
    context.textAlign = value < most ? "center" : "right"; // the last one within the canvas
    if (value > 1) context.fillText(shown(value), x(value) + (value < most ? 0 : RIGHT), height - 7);
  }
  context.beginPath();
  context.moveTo(x(1), y(1));
  context.lineTo(x(most), y(most));
  context.stroke();
  context.fillStyle = color("first");
  context.globalAlpha = 0.55;
  for (const [forecast, real] of points) {
    context.beginPath();
    context.arc(x(forecast), y(real), 2.2, 0, 2 * Math.PI);
    context.fill();
  }
  context.globalAlpha = 1;
  context.fillStyle = color("faint");
  context.textAlign = "right";
  context.fillText("forecast →", width - RIGHT, height - BOTTOM - 8);
  context.textAlign = "left";
  context.fillText("↑ real", LEFT + 4, TOP + 6);
}

// rows: [[name, [[from, to, color, height 0..1], ...]], ...]; times in seconds before now
export function bars(canvas, rows, seconds, names) {
  const { context, width, height } = prepare(canvas);
  const left = names ? 110 : LEFT, row = (height - TOP - BOTTOM) / Math.max(1, rows.length);
  const x = (age) => width - RIGHT - (age / seconds) * (width - left - RIGHT);
  context.textBaseline = "middle";
  rows.forEach(([name, spans], index) => {
    const top = TOP + index * row;
    context.fillStyle = color("faint");
    context.textAlign = "right";
    if (name && (row >= 11 || index % Math.ceil(11 / row) === 0)) {
      context.fillText(name.length > 16 ? `${name.slice(0, 15)}…` : name, left - 6, top + row / 2);
    }
    for (const [from, to, shade, high] of spans) {
      if (to > seconds) continue;
      const begin = x(Math.min(from, seconds)), tall = Math.max(1, (row - (row > 4 ? 1.5 : 0)) * high);
      context.fillStyle = color(shade);
      context.fillRect(begin, top + row - tall, Math.max(1, x(to) - begin - 0.5), tall);
    }
  });
  context.fillStyle = color("faint");
  context.textAlign = "left";
  context.fillText(`${seconds} s ago`, left, height - 7);
  context.textAlign = "right";
  context.fillText("now", width - RIGHT, height - 7);
}
