// The frames of one run, which frames.py describes, and the block pool at any of them, forwards and backwards.

export class Recording {
  frames = [];
  pool; // what each block holds at frame `at`: [role, request]
  at = -1;
  #newest; // what each block holds at the last frame
  #undo = []; // of each frame, what its changed blocks held before

  /** @param {{blocks: number, slots: number, budget: number}} settings the sliders of the run */
  constructor(settings) {
    this.settings = settings;
    this.pool = Array(settings.blocks).fill(FREE);
    this.#newest = [...this.pool];
  }

  /** Frames that have just been computed. */
  add(frames) {
    for (const frame of frames) {
      this.#undo.push(frame.blocks.map(([block]) => [block, ...this.#newest[block]]));
      for (const [block, role, request] of frame.blocks) this.#newest[block] = [role, request];
      this.frames.push(frame);
    }
  }

  /** Have `pool` show the frame with this number, −1: before the first. Returns the blocks that have changed. */
  moveTo(target) {
    const changed = new Set();
    const apply = ([block, role, request]) => {
      this.pool[block] = [role, request];
      changed.add(block);
    };
    while (this.at < target) this.frames[++this.at].blocks.forEach(apply);
    while (this.at > target) this.#undo[this.at--].forEach(apply);
    return changed;
  }

  /** The number of the last frame that has begun at a time; −1 before the first. */
  frameAt(time) {
    let [low, high] = [0, this.frames.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].time <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** Whether its last step was over at a time. */
  isOver(time) {
    const last = this.frames.at(-1);
    return last !== undefined && time >= last.time + last.seconds;
  }

  /** The most tokens of a step, and the longest queue, for the scales of the two strips. */
  get peaks() {
    let [tokens, waiting] = [1, 1];
    for (const frame of this.frames) {
      tokens = Math.max(tokens, frame.prompt + frame.generated);
      waiting = Math.max(waiting, frame.waiting);
    }
    return { tokens, waiting };
  }
}

const FREE = ["free", ""];
