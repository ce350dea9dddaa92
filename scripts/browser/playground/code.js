// The code of a pane's scheduler in an editor, and what the reader writes there: changes, or files of the learner's.

import { say } from "../browser/say.js";
import * as store from "../browser/store.js";
import { sourceOf } from "./runs.js";

/** Whose code it is: the learner's own, in the files of the labs; changes of the package's are a pane's. */
export const OWN = "own";

export class Code {
  #originals = new Map(); // module → its code
  #files; // module → path of the learner's file
  #editor = null;
  #open = { whose: "", module: "" }; // what the editor has
  #asked = ""; // the key of what it is to have
  #listeners;

  /**
   * @param {HTMLElement} parent where the editor goes
   * @param {object} files module → path of the learner's file
   * @param {{onChange: () => void, onRun: () => void}} listeners the reader has changed the code, or pressed Ctrl+Enter
   */
  constructor(parent, files, listeners) {
    this.parent = parent;
    this.#files = files;
    this.#listeners = listeners;
  }

  /** Where the browser keeps it, also when the page is closed. */
  #key(whose, module) {
    return whose === OWN ? this.#files[module] : `playground/${whose}/${module}`;
  }

  /** What a run needs of these modules: module → the code that is not the package's. */
  sources(whose, modules) {
    const kept = modules.map((module) => [module, store.read(this.#key(whose, module))]);
    return Object.fromEntries(kept.filter(([, text]) => text !== null));
  }

  /** Whether there are changes to take back. */
  isChanged(whose, module) {
    return whose !== OWN && store.read(this.#key(whose, module)) !== null;
  }

  /** Show a module. Loads the editor, and Python for code of the package, when it is called first. */
  async show(whose, module, onLoading) {
    this.#asked = this.#key(whose, module);
    if (whose !== OWN && !this.#originals.has(module)) this.#originals.set(module, await sourceOf(module, onLoading));
    const { createEditor } = await import("../browser/editor.js");
    if (this.#asked !== this.#key(whose, module)) return; // the reader has gone on meanwhile
    this.#editor ??= createEditor(this.parent, {
      text: "",
      label: say("The scheduler's code"),
      onChange: (text) => this.#changed(text),
      onRun: this.#listeners.onRun,
    });
    const text = store.read(this.#key(whose, module)) ?? this.#originals.get(module);
    if (this.#has(whose, module) && this.#editor.text === text) return;
    this.#open = { whose: "", module: "" }; // what is set by us is no change of the reader's
    this.#editor.text = text;
    this.#editor.mark([]);
    this.#open = { whose, module };
  }

  #has(whose, module) {
    return this.#open.whose === whose && this.#open.module === module;
  }

  #changed(text) {
    const { whose, module } = this.#open;
    if (!whose) return;
    store.write(this.#key(whose, module), text === this.#originals.get(module) && whose !== OWN ? null : text);
    this.#listeners.onChange();
  }

  /** Take back all changes to a pane's module. In the editor that is a change too, which Ctrl+Z takes back. */
  reset(whose, module) {
    store.write(this.#key(whose, module), null);
    if (!this.#has(whose, module)) return;
    this.#editor.replace(this.#originals.get(module));
    this.#editor.mark([]);
  }

  /** Show the error of a run at its line, if its code is in the editor; null: it had none. */
  mark(whose, error) {
    if (this.#open.whose !== whose) return;
    const isHere = error?.line && error.module === this.#open.module;
    this.#editor.mark(isHere ? [{ line: error.line, message: `${error.kind}: ${error.message}` }] : []);
  }

  goTo(line) {
    this.#editor?.goTo(line);
  }
}
