// The picture as a file: an SVG that is legible on a light and on a dark page, wherever it is shown.

import { drawAll, layout } from "./picture.js";

const WIDTH = 760;
const MARGIN = 16;
const HEAD = 64; // of a pane: its name and its numbers
const LEGEND = 20; // of a row of it

const escaped = (words) => String(words).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

class SvgPen {
  shapes = [];
  #runs = new Map(); // row → the rectangle there that the next one may lengthen

  rect(x, y, width, height, colour) {
    const row = `${y} ${height}`;
    const last = this.#runs.get(row);
    // A row of narrow cells of one colour becomes one rectangle.
    if (last && last.colour === colour && Math.abs(last.x + last.width - x) < 0.01) last.width += width;
    else {
      const shape = { x, y, width, height, colour };
      this.shapes.push(shape);
      this.#runs.set(row, shape);
    }
  }

  text(x, y, words, colour, { align = "left", size = 11, bold = false } = {}) {
    this.shapes.push({ words, x, y, colour, align, size, bold });
  }

  toString() {
    return this.shapes.map(shape).join("\n");
  }
}

const round = (number) => Number(number.toFixed(2));

function shape({ words, x, y, width, height, colour, align, size, bold }) {
  if (words === undefined) {
    return `<rect class="${colour}" x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"/>`;
  }
  const style = `font-size="${round(size)}"${align === "middle" ? ' text-anchor="middle"' : ""}${bold ? ' font-weight="bold"' : ""}`;
  return `<text class="${colour}" x="${round(x)}" y="${round(y)}" ${style}>${escaped(words)}</text>`;
}

/**
 * The whole picture.
 *
 * @param {{title: string, summary: string, panes: {title: string, numbers: string[], recording, at: number}[],
 *   legend: [string, string][], palettes: {light: object, dark: object}}} shown palettes: role → colour
 * @returns {string}
 */
export function toSvg({ title, summary, panes, legend, palettes }) {
  const inner = WIDTH - 2 * MARGIN;
  let y = MARGIN + 8;
  const parts = [];
  for (const { title: name, numbers, recording, at } of panes) {
    const [pen, place] = [new SvgPen(), layout(inner, recording)];
    pen.text(0, 12, name, "ink", { size: 14, bold: true });
    numbers.forEach((line, index) => pen.text(0, 31 + 18 * index, line, "ink", { size: 12 }));
    parts.push(`<g transform="translate(${MARGIN} ${y})">\n${pen}\n</g>`);
    const drawn = new SvgPen();
    drawAll(drawn, place, recording, at);
    parts.push(`<g transform="translate(${MARGIN} ${y + HEAD})">\n${drawn}\n</g>`);
    y += HEAD + place.height + 26;
  }
  const pen = new SvgPen();
  let [x, below] = [0, 0];
  for (const [role, words] of legend) {
    const width = 20 + words.length * 6.9;
    if (x + width > inner) [x, below] = [0, below + LEGEND];
    pen.rect(x, below, 14, 14, role);
    pen.text(x + 20, below + 11.5, words, "ink", { size: 12 });
    x += width + 18;
  }
  parts.push(`<g transform="translate(${MARGIN} ${y})">\n${pen}\n</g>`);
  const height = y + below + LEGEND + 10;
  const rules = (palette) => Object.entries(palette).map(([role, colour]) => `.${role} { fill: ${colour}; }`).join(" ");
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" role="img">
<title>${escaped(title)}</title>
<desc>${escaped(summary)}</desc>
<style>
text { font-family: "DejaVu Sans", Verdana, sans-serif; }
rect { shape-rendering: crispEdges; }
${rules(palettes.light)}
@media (prefers-color-scheme: dark) { ${rules(palettes.dark)} }
</style>
<rect class="ground" width="${WIDTH}" height="${height}"/>
${parts.join("\n")}
</svg>
`;
}

/** Have the browser save a text as a file. */
export function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
