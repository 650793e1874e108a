// What the page does by itself: it shows what the service tells, notices that the service has gone quiet, follows links
// without a reload and the pointer over the block map, and says which event streams the service listens to.
(function () {
  "use strict";

  const STALE_MS = 5000;
  const RELOAD_MS = 15000;
  const POINT_MS = 120;
  const SOURCES_MS = 3000;
  const OWN_PATHS = ["/", "/request", "/block"];

  const byId = (id) => document.getElementById(id);
  const setProps = (id, props) => window.dash_clientside.set_props(id, props);

  // ------------------------------------------------------------------ what the service tells

  let toldAt = Date.now();
  let engine = "";
  const roots = {};

  // A tree of Dash's HTML components as React elements. Elements that stay the same stay in the page.
  function element(node) {
    if (Array.isArray(node)) return node.map(element);
    if (node === null || typeof node !== "object") return node;
    const { children, ...props } = node.props;
    return React.createElement(node.type.toLowerCase(), props, ...[].concat(element(children)));
  }

  function render(id, tree) {
    const place = byId(id);
    if (!place) return;
    roots[id] = roots[id] || ReactDOM.createRoot(place);
    roots[id].render(React.createElement(React.Fragment, null, ...[].concat(element(tree))));
  }

  function told(data) {
    if (!data) return;
    toldAt = Date.now();
    document.title = `${data.title} · kvscope`;
    for (const [id, tree] of Object.entries(data.sections)) render(id, tree);
    if (engine && data.engine !== engine) point(null);
    engine = data.engine;
  }

  function pointed(tree) {
    if (tree) render("pointed-block", tree);
  }

  // ------------------------------------------------------------------ is the service there?

  async function checkService() {
    const quietMs = Date.now() - toldAt;
    const stale = byId("stale");
    if (!stale) return;
    stale.hidden = quietMs < STALE_MS;
    if (stale.hidden) return;
    const since = new Date(toldAt).toISOString().slice(11, 19);
    stale.textContent = `No answer from the kvscope service since ${since} UTC. What is shown is as it was then.`;
    if (quietMs > RELOAD_MS && !document.hidden) {
      const answer = await fetch("/healthz").catch(() => null);
      if (answer && answer.ok) location.reload();
    }
  }

  // ------------------------------------------------------------------ what does it listen to?

  async function showSources() {
    const list = byId("sources");
    const banner = byId("unreadable");
    if (!list || !banner || document.hidden) return;
    const answer = await fetch("/api/sources").catch(() => null);
    if (!answer || !answer.ok) return;
    const sources = await answer.json();
    const items = sources.map((source) => {
      const item = document.createElement("li");
      const code = document.createElement("code");
      code.textContent = source.target;
      item.append(code);
      if (source.error) item.append(` ${source.error}`);
      return item;
    });
    list.replaceChildren(...items);
    const wrong = sources.filter((source) => source.error);
    banner.hidden = wrong.length === 0;
    banner.textContent = wrong.map((source) => `${source.target} cannot be read: ${source.error}`).join(" ");
  }

  // ------------------------------------------------------------------ the block map

  let block = null;
  let sentBlock = null;
  let timer = null;

  function grid(frame) {
    const { total, perCell, columns } = frame.dataset;
    const cells = Math.ceil(total / perCell);
    return { total: +total, perCell: +perCell, columns: +columns, rows: Math.ceil(cells / columns) };
  }

  function blockAt(frame, event) {
    const { total, perCell, columns, rows } = grid(frame);
    const box = byId("map").getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    if (column < 0 || column >= columns || row < 0 || row >= rows) return null;
    const first = (row * columns + column) * perCell;
    return first < total ? first : null;
  }

  // The service is asked for the last block pointed at, a few times a second at most.
  function point(next) {
    block = next;
    const frame = byId("map-frame");
    if (!frame) return;
    frame.classList.toggle("pointing", block !== null);
    if (block !== null) {
      const { perCell, columns } = grid(frame);
      const cell = Math.floor(block / perCell);
      frame.style.setProperty("--at-column", cell % columns);
      frame.style.setProperty("--at-row", Math.floor(cell / columns));
    }
    if (timer === null) {
      timer = setTimeout(() => {
        timer = null;
        if (block !== sentBlock) {
          sentBlock = block;
          setProps("pointed", { data: block });
        }
      }, POINT_MS);
    }
  }

  function openStory(of) {
    const search = new URLSearchParams({ engine, id: String(of) });
    setProps("url", { pathname: "/block", search: `?${search}` });
  }

  // The page's own links change the address and nothing else; the service is told, and answers with what to show.
  document.addEventListener("click", (event) => {
    const link = event.target.closest ? event.target.closest("a[href]") : null;
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    if (link.origin !== location.origin || !OWN_PATHS.includes(link.pathname) || link.hash) return;
    event.preventDefault();
    setProps("url", { pathname: link.pathname, search: link.search });
  });

  const frameOf = (event) => (event.target.closest ? event.target.closest("#map-frame") : null);

  document.addEventListener("pointermove", (event) => {
    const frame = frameOf(event);
    if (!frame) return;
    const at = blockAt(frame, event);
    if (at !== null && at !== block) point(at);
  });

  document.addEventListener("click", (event) => {
    const frame = frameOf(event);
    if (!frame) return;
    const at = blockAt(frame, event);
    if (at !== null) {
      point(at);
      openStory(at);
    }
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      const close = document.querySelector("#story .close");
      if (close) close.click();
      point(null);
      return;
    }
    const frame = frameOf(event);
    if (!frame) return;
    const { total, perCell, columns } = grid(frame);
    const steps = { ArrowRight: perCell, ArrowLeft: -perCell, ArrowDown: columns * perCell, ArrowUp: -columns * perCell };
    if (event.key in steps) {
      event.preventDefault();
      const next = block === null ? 0 : block + steps[event.key];
      if (next >= 0 && next < total) point(next);
    } else if (event.key === "Enter" && block !== null) {
      openStory(block);
    }
  });

  window.dash_clientside = Object.assign({}, window.dash_clientside, { kvscope: { told, pointed } });
  setInterval(checkService, 1000);
  setInterval(showSources, SOURCES_MS);
  const firstLook = setInterval(() => {
    if (!byId("sources")) return;
    clearInterval(firstLook);
    showSources();
  }, 50);
})();
