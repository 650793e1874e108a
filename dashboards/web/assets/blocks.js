// The slider of the block map: while it is moved the address follows a few times a second, and the map with it. It keeps
// the window that it was over when somebody took hold of it.
(function () {
  "use strict";

  const FOLLOW_MS = 120;
  let timer = null;
  let moved = false;
  let held = false;

  // At once, and then no sooner than in FOLLOW_MS again.
  function follow() {
    if (timer !== null) {
      moved = true;
      return;
    }
    goThere();
    timer = setTimeout(() => {
      timer = null;
      if (moved) follow();
      moved = false;
    }, FOLLOW_MS);
  }

  function goThere() {
    const scrub = document.getElementById("scrub");
    if (!scrub) return;
    const asked = new URLSearchParams(location.search);
    const over = scrub.parentElement.dataset;
    if (!asked.get("from")) asked.set("from", over.since);
    if (!asked.get("to")) asked.set("to", over.until);
    asked.set("at", new Date(Number(scrub.value)).toISOString());
    window.dash_clientside.set_props("url", { pathname: location.pathname, search: `?${asked}` });
  }

  // The value in words, for who cannot see it.
  function describe(scrub) {
    const ms = Number(scrub.value);
    const before = Math.round((Number(scrub.max) - ms) / 1000);
    const clock = kvscopePreferences.written(`${new Date(ms).toISOString().slice(11, 19)} UTC`);
    const span = before < 120 ? `${before} s` : `${Math.round(before / 60)} min`;
    scrub.setAttribute("aria-valuetext", before < 1 ? `${clock}, the end` : `${clock}, ${span} before the end`);
  }

  document.addEventListener("input", (event) => {
    if (event.target.id !== "scrub") return;
    held = true;
    describe(event.target);
    follow();
  });

  document.addEventListener("change", (event) => {
    if (event.target.id === "scrub") held = false;
  });

  let scrubbedTo = "";
  let shown = "";

  // The slider goes where the service says, unless somebody holds it; and the event that is looked at is in sight.
  function settle() {
    const scrub = document.getElementById("scrub");
    const at = scrub ? scrub.parentElement.dataset.at : "";
    if (scrub && !held && at !== scrubbedTo) scrub.value = scrubbedTo = at;
    if (scrub) describe(scrub);
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
