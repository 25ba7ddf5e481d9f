// Recordings in frames have the theme that the reader chose for the site, also when it changes.
const theme = () => ({ theme: document.body.dataset.mdColorScheme === "slate" ? "dark" : "light" });
addEventListener("message", ({ data, source }) => {
  if (data?.ask === "theme") source.postMessage(theme(), "*");
});
new MutationObserver(() => {
  for (const frame of document.querySelectorAll("iframe.recording")) frame.contentWindow.postMessage(theme(), "*");
}).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });

// A table that is wider than the screen is scrolled by keys too.
const reachable = () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
    else each.removeAttribute("tabindex");
  }
};
document$.subscribe(() => setTimeout(reachable));
addEventListener("resize", reachable);
