// The one colour code: minicache.palette, as the site's style sheets have it (palette.css).

const ROLES = ["prompt", "generated", "end", "shared", "free", "wasted"];

/** Role → colour, and `on` role → the colour of letters on it, in the scheme that the page has now. */
export function colours() {
  const style = getComputedStyle(document.body);
  const value = (name) => style.getPropertyValue(name).trim();
  const found = { ink: value("--mc-ink"), grid: value("--mc-grid"), ground: value("--md-default-bg-color") };
  for (const role of ROLES) {
    found[role] = value(`--mc-${role}`);
    found[`on-${role}`] = value(`--mc-on-${role}`);
  }
  return found;
}

/** Call `then` whenever the reader, or the system, changes between light and dark. */
export function onSchemeChange(then) {
  new MutationObserver(then).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
}
