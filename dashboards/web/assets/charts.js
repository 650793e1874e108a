// A chart over time: dragging over it chooses a window, a click a moment; the legend beside it tells the figures at the
// pointer. Loaded before kvscope.js, which renders it; Plotly itself is loaded with the first chart.
(function () {
  "use strict";

  const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
  let loading = null;

  function plotly() {
    loading = loading || new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = document.getElementById("page").dataset.plotly;
      script.onload = () => resolve(window.Plotly);
      script.onerror = reject;
      document.head.append(script);
    });
    return loading;
  }

  // The axis is in the viewer's zone, and Plotly names none: 2026-11-23 13:38:33.5609.
  function rfc3339(x) {
    const ms = Date.parse(`${x.replace(" ", "T").replace(/(\.\d{3})\d*Z?$|Z$/, "$1")}Z`);
    return new Date(kvscopePreferences.unshifted(ms)).toISOString().replace(".000Z", "Z");
  }

  const moment = (chart, index) => chart.data[0].x[index].slice(11, 19);
  const digits = (value) => Math.abs(value) < 1 ? 2 : Math.abs(value) < 10 ? 1 : 0;
  const written = (value, unit, none) => value === null || value === undefined ? none : value.toLocaleString("en-US", { maximumFractionDigits: digits(value) }) + unit;

  // Nothing is drawn anew while a chart is being dragged over.
  let held = false;
  document.addEventListener("pointerdown", (event) => {
    held = Boolean(event.target.closest && event.target.closest(".plot"));
  });
  document.addEventListener("pointerup", () => setTimeout(() => { held = false; }));

  // What the legend says of each trace at one of the moments.
  function read(chart, index) {
    const legend = document.getElementById(chart.dataset.legend);
    if (!legend || !chart.data || !chart.data[0].x.length) return;
    for (const place of legend.querySelectorAll("[data-trace]")) {
      const value = chart.data[place.dataset.trace].y[index];
      place.textContent = written(value, place.dataset.unit || "", place.dataset.none);
      place.classList.toggle("zero", !value);
    }
    for (const place of legend.querySelectorAll("[data-moment]")) place.textContent = moment(chart, index);
  }

  function Chart({ id, figure, className, zone, go, follow }) {
    const place = React.useRef(null);
    const latest = React.useRef(null);

    function draw() {
      const chart = place.current;
      const next = kvscopePreferences.shifted(latest.current);
      if (!chart) return;
      next.layout.xaxis.nticks = Math.max(2, Math.floor((chart.clientWidth - 62) / 70)); // labels must not touch
      plotly().then((Plotly) => {
        if (!place.current) return;
        const isNew = !chart.data;
        Plotly.react(chart, next.data, next.layout, CONFIG).then(() => read(chart, next.layout.meta.chosen));
        if (!isNew) return;
        const rest = () => chart.layout && read(chart, chart.layout.meta.chosen);
        chart.on("plotly_hover", (event) => {
          const point = event.points.find((one) => one.data.meta !== "marks");
          if (point) read(chart, point.pointNumber);
        });
        chart.on("plotly_unhover", rest);
        chart.on("plotly_relayout", (change) => {
          const [since, until] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
          const [from, to] = chart.layout.meta.times;
          if (since && until) go({ [from]: rfc3339(since), [to]: rfc3339(until), at: "" });
        });
        chart.on("plotly_click", (event) => {
          const mark = event.points.find((one) => one.data.meta === "marks");
          if (mark) follow(mark.customdata);
          else if (event.points.length && chart.layout.meta.times[0] === "from") { // a moment is in the view's own window
            const [from, to] = chart.layout.xaxis.range.map(rfc3339);
            go({ from, to, at: rfc3339(event.points[0].x) });
          }
        });
      });
    }

    React.useEffect(() => {
      latest.current = figure;
      draw();
    }, [figure, zone]);

    React.useEffect(() => {
      const chart = place.current;
      return () => window.Plotly && window.Plotly.purge(chart);
    }, []);

    return React.createElement("div", { id, className, ref: place, "data-legend": figure.layout.meta.legend });
  }

  window.kvscopeCharts = { Chart, isHeld: () => held };
})();
