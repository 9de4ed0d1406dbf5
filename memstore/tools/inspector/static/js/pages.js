// Blocks of one document, fetched a page at a time. Pages that were not looked at for long are dropped, so that
// scrolling through everything takes no more memory than standing still.

const SIZE = 64; // blocks
const MOST = 24; // pages
const PAUSE = 40; // milliseconds that a place must be in view before it is asked for, while everything moves
const QUIET = 200; // milliseconds without a request after which nothing moves any more

export class Pages {
  /** `load(start, stop, signal)` gives blocks; `arrived(answer)` is called with each answer, `failed` with errors. */
  constructor(load, arrived, failed) {
    Object.assign(this, { load, arrived, failed, coming: new Map(), timer: null, asked: -QUIET });
    this.pages = new Map(); // in the order of their last use
  }

  /** A block that is here, or undefined. */
  get(block) {
    return this.pages.get(Math.floor(block / SIZE))?.get(block);
  }

  /** Fetch what is missing of blocks from `start` to before `stop`; stop fetching what is not among them. */
  want(start, stop) {
    const wanted = new Set();
    for (let page = Math.floor(start / SIZE); page * SIZE < stop; page += 1) wanted.add(page);
    for (const page of wanted) {
      if (this.pages.has(page)) {
        const kept = this.pages.get(page);
        this.pages.delete(page);
        this.pages.set(page, kept);
      }
    }
    for (const [page, controller] of this.coming) if (!wanted.has(page)) controller.abort();
    const missing = [...wanted].filter((page) => !this.pages.has(page) && !this.coming.has(page));
    clearTimeout(this.timer);
    if (!missing.length) return;
    const quiet = performance.now() - this.asked > QUIET;
    this.asked = performance.now();
    if (quiet) missing.forEach((page) => this.fetch(page));
    else this.timer = setTimeout(() => missing.forEach((page) => this.fetch(page)), PAUSE);
  }

  async fetch(page) {
    if (this.pages.has(page) || this.coming.has(page)) return;
    const controller = new AbortController();
    this.coming.set(page, controller);
    try {
      const answer = await this.load(page * SIZE, (page + 1) * SIZE, controller.signal);
      this.pages.set(page, new Map(answer.blocks.map((block) => [block.block, block])));
      for (const old of this.pages.keys()) {
        if (this.pages.size <= MOST) break;
        this.pages.delete(old);
      }
      this.coming.delete(page);
      this.arrived(answer);
    } catch (error) {
      this.coming.delete(page);
      if (error.name !== "AbortError") this.failed(error);
    }
  }

  /** Forget the page of a block, which has changed. */
  drop(block) {
    this.pages.delete(Math.floor(block / SIZE));
  }

  /** Ask for nothing more. */
  close() {
    clearTimeout(this.timer);
    for (const controller of this.coming.values()) controller.abort();
  }
}
