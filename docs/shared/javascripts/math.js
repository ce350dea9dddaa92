// Renders what arithmatex marked as math, on every page that the theme shows.
document$.subscribe(() => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim();
    const displayMode = source.startsWith("\\[");
    katex.render(source.slice(2, -2), element, { displayMode, throwOnError: false });
  }
});
