// The slider of the block map: while it is moved the address follows a few times a second, and the map with it. It keeps
// the window that it was over when somebody took hold of it.
(function () {
  "use strict";

  const FOLLOW_MS = 120;
  let timer = null;
  let held = false;

  function goThere() {
    timer = null;
    const scrub = document.getElementById("scrub");
    if (!scrub) return;
    const asked = new URLSearchParams(location.search);
    const over = scrub.parentElement.dataset;
    if (!asked.get("from")) asked.set("from", over.since);
    if (!asked.get("to")) asked.set("to", over.until);
    asked.set("at", new Date(Number(scrub.value)).toISOString());
    window.dash_clientside.set_props("url", { pathname: location.pathname, search: `?${asked}` });
  }

  document.addEventListener("input", (event) => {
    if (event.target.id !== "scrub") return;
    held = true;
    if (timer === null) timer = setTimeout(goThere, FOLLOW_MS);
  });

  document.addEventListener("change", (event) => {
    if (event.target.id === "scrub") held = false;
  });

  let shown = "";

  // Where the slider stands is the service's word, unless somebody holds it; and the event that is looked at is in sight.
  function settle() {
    const scrub = document.getElementById("scrub");
    if (scrub && !held) scrub.value = scrub.parentElement.dataset.at;
    const now = document.querySelector('.events [aria-current="step"]');
    const next = now ? now.href : "";
    if (now && next !== shown) {
      const list = now.closest(".events");
      list.scrollTop += now.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 2;
    }
    shown = next;
  }

  const watched = { subtree: true, childList: true, attributeFilter: ["data-at", "aria-current"] };
  new MutationObserver(settle).observe(document.documentElement, watched);
})();
