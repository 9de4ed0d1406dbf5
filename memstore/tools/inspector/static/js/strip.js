// The bar beside a document: where the view is, where lit blocks and matches lie; drag it to go elsewhere.

import { ink } from "./attention.js";

const PAGE = 0.9;

export class Strip {
  /** `go(block)` moves the view; `scroll(part)` scrolls it by parts of its height. */
  constructor(canvas, go, scroll) {
    Object.assign(this, { canvas, go, scroll });
    Object.assign(this, { lit: new Map(), matches: [], range: { first: 0, stop: 0 }, place: { top: 0, bottom: 0 } });
    canvas.addEventListener("pointerdown", (event) => this.drag(event));
    canvas.addEventListener("pointermove", (event) => event.buttons && this.drag(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => this.scroll(event.deltaY / 500), { passive: true });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  update(changes) {
    Object.assign(this, changes);
    const { canvas, range, place } = this;
    canvas.setAttribute("aria-valuemin", range.first);
    canvas.setAttribute("aria-valuemax", Math.max(range.first, range.stop - 1));
    canvas.setAttribute("aria-valuenow", Math.floor(place.top));
    this.draw();
  }

  draw() {
    const { canvas, range, place } = this;
    const scale = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      canvas.width = width * scale;
      canvas.height = height * scale;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const blocks = Math.max(1, range.stop - range.first);
    const y = (block) => ((block - range.first) / blocks) * height;
    const style = getComputedStyle(canvas);
    const bar = (block, colour, left, right, strength) => {
      pen.globalAlpha = strength;
      pen.fillStyle = style.getPropertyValue(colour);
      pen.fillRect(left, Math.min(y(block), height - 2), right - left, Math.max(2, height / blocks));
    };
    pen.globalAlpha = 1;
    pen.fillStyle = style.getPropertyValue("--thumb");
    const size = Math.max(18, y(place.bottom) - y(place.top));
    pen.fillRect(0, Math.min(y(place.top), height - size), width, size);
    for (const block of this.matches) bar(block, "--found", 0, width * 0.4, 0.9);
    for (const [block, share] of this.lit) bar(block, "--lit", width * 0.4, width, 0.25 + 0.75 * ink(share));
  }

  drag(event) {
    this.canvas.setPointerCapture(event.pointerId);
    const { top, height } = this.canvas.getBoundingClientRect();
    const { first, stop } = this.range;
    const part = Math.max(0, Math.min(1, (event.clientY - top) / height));
    this.go(Math.min(stop - 1, first + Math.floor(part * (stop - first))));
  }

  key(event) {
    const { first, stop } = this.range;
    const moves = {
      ArrowUp: () => this.scroll(-0.1),
      ArrowDown: () => this.scroll(0.1),
      PageUp: () => this.scroll(-PAGE),
      PageDown: () => this.scroll(PAGE),
      Home: () => this.go(first),
      End: () => this.go(stop - 1),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    moves[event.key]();
  }
}
