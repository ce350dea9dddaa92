// What scrolls sideways can be reached by the Tab key, and then scrolled with the arrows.
const scrolls = "pre > code, .md-typeset__scrollwrap, .md-typeset .arithmatex, figure.drawn > p";
const mark = () => {
  for (const element of document.querySelectorAll(scrolls)) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
};
document$.subscribe(() => requestAnimationFrame(mark));
addEventListener("resize", mark);
