// What a viewer prefers, kept in this browser: the zone in which times are written, and a dark or a light page. The
// service writes all times in UTC; texts, fields and charts are rewritten here as they are shown.
(function () {
  "use strict";

  const THEMES = ["auto", "dark", "light"];
  const TIME = /(?<![\w:./-])(?:(\d{4}-\d\d-\d\d)[T ])?(\d\d:\d\d:\d\d)(\.\d+)?Z?(?![\w:])/g;
  let listener = () => {};

  function kept(name, values) {
    try {
      const value = localStorage.getItem(`kvscope.${name}`);
      return values.includes(value) ? value : values[0];
    } catch {
      return values[0]; // a browser that keeps nothing
    }
  }

  function keep(name, value) {
    try {
      localStorage.setItem(`kvscope.${name}`, value);
    } catch { /* it holds for this page */ }
  }

  let zone = kept("zone", ["utc", "browser"]);
  let theme = kept("theme", THEMES);

  // ------------------------------------------------------------------ times

  const offset = (ms) => (zone === "utc" ? 0 : -new Date(ms).getTimezoneOffset() * 60_000);
  const iso = (ms) => new Date(ms).toISOString().replace(".000Z", "Z");

  function zoneName() {
    const parts = new Intl.DateTimeFormat("en", { timeZoneName: "short" }).formatToParts(new Date());
    return parts.find((part) => part.type === "timeZoneName").value;
  }

  // A text with its times in the zone. A time without a day is one of today, near enough for the zone's offset.
  function written(text) {
    if (zone === "utc" || typeof text !== "string") return text;
    let isChanged = /^\s*UTC\W*$/.test(text);
    const there = text.replace(TIME, (whole, day, clock, fraction = "") => {
      const ms = Date.parse(`${day ?? new Date().toISOString().slice(0, 10)}T${clock}Z`);
      if (Number.isNaN(ms)) return whole;
      isChanged = true;
      const shown = new Date(ms + offset(ms)).toISOString();
      return `${day ? `${shown.slice(0, 10)} ` : ""}${shown.slice(11, 19)}${fraction}`;
    });
    return isChanged ? there.replace(/\bUTC\b/g, zoneName()) : there;
  }

  // What was typed in the zone, as addresses carry it. `shown`: what the field had, which has the day of a bare clock.
  function typed(text, shown) {
    if (zone === "utc") return text;
    const clock = /^\d\d:\d\d/.test(text);
    const day = /^\d{4}-\d\d-\d\d/.exec(shown)?.[0] ?? new Date(Date.now() + offset(Date.now())).toISOString().slice(0, 10);
    const whole = clock ? `${day}T${text}` : text.replace(" ", "T");
    if (!/^\d{4}-\d\d-\d\dT[\d:.]+$/.test(whole)) return text;
    const ms = Date.parse(whole); // without an offset: of the browser's zone
    return Number.isNaN(ms) ? text : iso(ms);
  }

  // A chart whose axis is in the zone. Plotly takes a number for a time in the browser's own zone, a text as it stands.
  function shifted(figure) {
    const off = offset(figure.layout.xaxis.range[0]);
    const move = (ms) => new Date(ms + off).toISOString();
    const { xaxis, shapes = [], ...layout } = figure.layout;
    return {
      data: figure.data.map((trace) => ({ ...trace, x: trace.x.map(move) })),
      layout: {
        ...layout,
        xaxis: { ...xaxis, range: xaxis.range.map(move) },
        shapes: shapes.map((shape) => (shape.xref === "x" ? { ...shape, x0: move(shape.x0), x1: move(shape.x1) } : shape)),
      },
    };
  }

  // ------------------------------------------------------------------ choices

  function paint() {
    document.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest ? event.target.closest("[data-zone], [data-theme-next]") : null;
    if (!button) return;
    if (button.dataset.zone) {
      zone = button.dataset.zone;
      keep("zone", zone);
    } else {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      keep("theme", theme);
      paint();
    }
    listener();
  });

  paint();
  window.kvscopePreferences = {
    written,
    typed,
    shifted,
    unshifted: (ms) => ms - offset(ms),
    zone: () => zone,
    theme: () => theme,
    onChange: (call) => { listener = call; },
  };
})();
