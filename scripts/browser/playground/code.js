// The code of a pane's scheduler in an editor, and the changes that were made to it.

import { say } from "../browser/say.js";
import { sourceOf } from "./runs.js";

export class Code {
  #edits = new Map(); // "pane module" → the changed code
  #originals = new Map(); // module → its code
  #editor = null;
  #open = ""; // the key of what the editor has
  #onChange;

  /**
   * @param {HTMLElement} parent where the editor goes
   * @param {() => void} onChange the code has been changed by the reader
   */
  constructor(parent, onChange) {
    this.parent = parent;
    this.#onChange = onChange;
  }

  /** What a run of the pane needs: module → changed code; empty if nothing is changed. */
  sources(pane, module) {
    const edit = this.#edits.get(`${pane} ${module}`);
    return edit === undefined ? {} : { [module]: edit };
  }

  isChanged(pane, module) {
    return this.#edits.has(`${pane} ${module}`);
  }

  /** Show the code of a pane's module. Loads the editor, and Python, when it is called first. */
  async show(pane, module, onLoading) {
    if (!this.#originals.has(module)) this.#originals.set(module, await sourceOf(module, onLoading));
    if (!this.#editor) {
      const { createEditor } = await import("../browser/editor.js");
      const onChange = (text) => this.#changed(text);
      this.#editor = createEditor(this.parent, { text: "", label: say("The scheduler's code"), onChange });
    }
    const key = `${pane} ${module}`;
    if (this.#open === key) return;
    this.#open = ""; // what is set by us is no change of the reader's
    this.#editor.text = this.#edits.get(key) ?? this.#originals.get(module);
    this.#editor.mark([]);
    this.#open = key;
  }

  #changed(text) {
    if (!this.#open) return;
    const module = this.#open.split(" ")[1];
    if (text === this.#originals.get(module)) this.#edits.delete(this.#open);
    else this.#edits.set(this.#open, text);
    this.#onChange();
  }

  /** Take back all changes to a pane's module. */
  reset(pane, module) {
    this.#edits.delete(`${pane} ${module}`);
    if (this.#open !== `${pane} ${module}`) return;
    this.#editor.text = this.#originals.get(module);
    this.#editor.mark([]);
  }

  /** Show the error of a pane's run at its line, if its code is in the editor; null: it had none. */
  mark(pane, module, error) {
    if (this.#open !== `${pane} ${module}`) return;
    const found = error?.line ? [{ line: error.line, message: `${error.kind}: ${error.message}` }] : [];
    this.#editor.mark(found);
  }

  goTo(line) {
    this.#editor?.goTo(line);
  }
}
