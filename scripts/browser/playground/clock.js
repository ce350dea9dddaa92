// One clock for all recordings: its ticks are the times at which a step of any of them begins.

export class Clock {
  ticks = [];

  /** Take in what the recordings have by now. */
  update(recordings) {
    const times = recordings.flatMap((recording) => recording.frames.map((frame) => frame.time));
    this.ticks = [...new Set(times)].sort((one, other) => one - other);
  }

  get last() {
    return this.ticks.length - 1;
  }

  clamp(tick) {
    return Math.max(0, Math.min(tick, this.last));
  }
}

/** Moves the clock on, tick by tick, as long as it plays: `onTick(tick)` at most once a picture of the screen. */
export class Player {
  playing = false;
  #from = 0;
  #began = 0;

  /**
   * @param {Clock} clock
   * @param {{speed: () => number, onTick: (tick: number) => void, onEnd: () => void, isGrowing: () => boolean}} options
   *   `speed`: ticks a second; `isGrowing`: whether more ticks may come, so the last is not the end
   */
  constructor(clock, options) {
    this.clock = clock;
    this.options = options;
  }

  play(from) {
    this.playing = true;
    this.restart(from);
    requestAnimationFrame(this.#step);
  }

  /** Count from this tick and this moment on: after a jump, or another speed. */
  restart(from) {
    this.#from = from;
    this.#began = performance.now();
  }

  pause() {
    this.playing = false;
  }

  #step = (now) => {
    if (!this.playing) return;
    const wanted = this.#from + Math.floor(((now - this.#began) / 1000) * this.options.speed());
    const tick = this.clock.clamp(wanted);
    if (wanted > tick) this.restart(tick); // it has reached the end of what is computed
    this.options.onTick(tick);
    if (tick === this.clock.last && wanted >= tick && !this.options.isGrowing()) {
      this.playing = false;
      this.options.onEnd();
    } else requestAnimationFrame(this.#step);
  };
}
