// Before the page is painted, so that the chosen theme does not flash in.
"use strict";
(() => {
  const chosen = localStorage.getItem("multirate-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
