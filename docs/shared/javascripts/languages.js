// The language switch leads to the section that is being read: headings have the same ids in both languages.
addEventListener("click", (event) => {
  const link = event.target.closest?.(".languages a");
  if (link) link.hash = location.hash;
});
