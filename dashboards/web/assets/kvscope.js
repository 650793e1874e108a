// What the page does by itself: it shows what the service sends, notices that the service has gone quiet, follows links,
// forms and keys without a reload and the pointer over the block map, and says which event streams the service listens to.
(function () {
  "use strict";

  const STALE_MS = 5000;
  const RELOAD_MS = 15000;
  const ANSWER_MS = 1500;
  const POINT_MS = 120;
  const SOURCES_MS = 3000;
  const TEXTS = ["title", "aria-label", "aria-valuetext"];

  const byId = (id) => document.getElementById(id);
  const setProps = (id, props) => window.dash_clientside.set_props(id, props);

  // ------------------------------------------------------------------ what the service tells

  let receivedAt = Date.now();
  let engine = "";
  let view = "";
  let trees = {};
  let main = [];
  let roots = new WeakMap();

  // A tree of Dash's components as React elements. Elements that stay the same stay in the page.
  function element(node) {
    const { written, zone, theme } = kvscopePreferences;
    if (Array.isArray(node)) return node.map(element);
    if (node === null || typeof node !== "object") return written(node);
    const { children, ...props } = node.props;
    if (node.type === "Graph") {
      return React.createElement(kvscopeCharts.Chart, { ...props, zone: zone(), go: changeTime, follow });
    }
    for (const name of TEXTS) if (props[name]) props[name] = written(props[name]);
    if (props["data-zone"]) props["aria-pressed"] = String(props["data-zone"] === zone());
    if (props["data-theme-next"]) props.title = `Colours: ${theme()}`;
    if (node.type === "Input") {
      const { value, ...rest } = props;
      if (props.type === "hidden") return React.createElement("input", props);
      if (props.className !== "time") return React.createElement("input", { ...rest, defaultValue: value });
      return React.createElement("input", { ...rest, key: zone(), defaultValue: written(value) });
    }
    if (node.type === "Select") props.defaultValue = props["data-value"];
    const isName = node.type === "Code" || props["data-zone"] || /\b(id|name)\b/.test(props.className ?? "");
    const inside = isName && typeof children === "string" ? children : element(children);
    return React.createElement(node.type.toLowerCase(), props, ...[].concat(inside));
  }

  // A section is rendered again only if its data or its format has changed.
  const Section = React.memo(({ tree }) => React.createElement(React.Fragment, null, ...[].concat(element(tree))));

  function render(id, children) {
    const place = byId(id);
    if (!place) return;
    if (!roots.has(place)) roots.set(place, ReactDOM.createRoot(place));
    roots.get(place).render(children);
  }

  const section = (name) => React.createElement(Section, { key: name, tree: trees[name], zone: kvscopePreferences.zone(), theme: kvscopePreferences.theme() });

  function show() {
    for (const name of ["bar", "alarms", "aside"]) render(name, section(name));
    byId("aside").hidden = !trees.aside || trees.aside.length === 0;
    render("view", main.map((name) => section(name)));
  }

  function received(data) {
    if (!data) return;
    receivedAt = Date.now();
    byId("page").dataset.received = data.at;
    byId("empty").hidden = !data.empty;
    byId("stale").hidden = true;
    document.title = `${data.title} · kvscope`;
    if (data.address !== location.href) return; // of where one was before a link was followed
    const names = [...data.main, "bar", "alarms", "aside"];
    const known = Object.entries(trees).filter(([name]) => names.includes(name));
    const news = Object.entries(data.sections).map(([name, text]) => [name, JSON.parse(text)]);
    trees = Object.fromEntries([...known, ...news]);
    if (kvscopeCharts.isHeld()) return;
    main = data.main;
    show();
    if (engine && data.engine !== engine) point(null);
    engine = data.engine;
    pointing = data.pointing;
    if (block !== null && byId("map-frame")) sendPoint();
    if (view !== location.pathname + engine) {
      view = location.pathname + engine;
      byId("arrived").textContent = data.title;
      requestAnimationFrame(() => setTimeout(showTab));
    }
  }

  // Where the views are one line that is moved sideways.
  function showTab() {
    const tab = document.querySelector('#views a[aria-current="page"]');
    const list = byId("views")?.firstElementChild;
    if (tab) list.scrollLeft = tab.offsetLeft - list.offsetLeft - (list.clientWidth - tab.clientWidth) / 2;
  }

  function pointed(tree) {
    render("pointed-block", element(tree));
  }

  const SHOWS = { received, pointed };

  function PushedData({ data, shows }) {
    React.useEffect(() => {
      if (data) SHOWS[shows](data);
    }, [data]);
    return null;
  }

  // ------------------------------------------------------------------ addresses

  // Before the page is there, none is.
  const isOwn = (path) => (byId("page")?.dataset.paths ?? "").split(" ").includes(path);

  // The page's own links change the address and nothing else; the service receives it and sends what to show.
  function go(pathname, search) {
    for (const menu of document.querySelectorAll("details.menu[open]")) menu.open = false;
    setProps("url", { pathname, search });
  }

  function follow(href) {
    const to = new URL(href, location.href);
    go(to.pathname, to.search);
  }

  // The same place at another time.
  function changeTime(changes) {
    const asked = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) value ? asked.set(name, value) : asked.delete(name);
    go(location.pathname, `?${asked}`);
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest ? event.target.closest("a[href]") : null;
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.open = false;
    }
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    if (link.origin !== location.origin || !isOwn(link.pathname) || link.hash) return;
    event.preventDefault();
    go(link.pathname, link.search);
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    const path = new URL(form.action).pathname;
    if (form.method !== "get" || !isOwn(path)) return;
    event.preventDefault();
    const utc = (name, value) => {
      const input = form.elements[name];
      return input.className === "time" ? kvscopePreferences.typed(value, input.defaultValue) : value;
    };
    const fields = [...new FormData(form)].filter(([, value]) => value).map(([name, value]) => [name, utc(name, value)]);
    go(path, fields.length ? `?${new URLSearchParams(fields)}` : "");
  });

  // ------------------------------------------------------------------ keys

  // A link or button says by data-key which key presses it, and by data-does what that does.
  function listKeys() {
    const rows = [...document.querySelectorAll("[data-key]")].map((one) => [one.dataset.key, one.dataset.does]);
    rows.push(["?", "these keys"], ["Escape", "close what is open"]);
    const dialog = byId("keys");
    const list = rows.map(([name, does]) => [
      React.createElement("dt", { key: `${name} key` }, React.createElement("kbd", null, name)),
      React.createElement("dd", { key: name }, does),
    ]);
    const close = React.createElement("button", { type: "button", autoFocus: true, onClick: () => dialog.close() }, "Close");
    render("keys", [React.createElement("h2", { key: 1 }, "Keys"), React.createElement("dl", { key: 2 }, list.flat()),
      React.createElement("form", { key: 3, method: "dialog" }, close)]);
    dialog.showModal();
  }

  function pressed(event) {
    const target = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return false;
    if (event.key === "?") {
      byId("keys").open ? byId("keys").close() : listKeys();
      return true;
    }
    if (byId("keys").open || !/^[\x21-\x7e]$/.test(event.key)) return false;
    const wanted = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (!wanted) return false;
    if (wanted.tagName === "SUMMARY") wanted.focus();
    wanted.click();
    return true;
  }

  document.addEventListener("click", (event) => {
    if (event.target.closest && event.target.closest("#keys-button")) listKeys();
  });

  // A browser without access to its clipboard, as over plain HTTP from another host, leaves the command selected.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest ? event.target.closest("[data-copy]") : null;
    if (!button) return;
    const text = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(text);
    if (!navigator.clipboard) return;
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  });

  // ------------------------------------------------------------------ is the service there?

  async function checkService() {
    const quietMs = Date.now() - receivedAt;
    const stale = byId("stale");
    if (!stale) return;
    if (quietMs < STALE_MS) {
      stale.hidden = true;
      return;
    }
    const answer = await fetch("/healthz", { signal: AbortSignal.timeout(ANSWER_MS) }).catch(() => null);
    if (Date.now() - receivedAt < STALE_MS) return; // it came meanwhile
    const since = new Date(receivedAt).toISOString().slice(11, 19);
    stale.hidden = false;
    stale.textContent = answer && answer.ok
      ? "The kvscope service is at work on this view, which takes long."
      : kvscopePreferences.written(`No answer from the kvscope service since ${since} UTC. What is shown is as it was then.`);
    if (answer && answer.ok && quietMs > RELOAD_MS && !document.hidden) location.reload();
  }

  // ------------------------------------------------------------------ what does it listen to?

  function stateOf(source) {
    if (source.error) return source.error.replace(`${source.target} `, "");
    if (source.ended) return "has ended";
    return source.engines.length ? "is being read" : "has sent nothing yet";
  }

  // The probe listens where this service reads. On another host, it listens on all of that host's addresses.
  function probeCommand(sources) {
    const stream = sources.find((source) => source.kind === "stream");
    if (!stream) return;
    const endpoint = stream.target.replace("//localhost:", "//127.0.0.1:").replace(/^tcp:\/\/(?!127\.)[^/]+(?=:\d+$)/, "tcp://0.0.0.0");
    byId("probe-command").textContent = `KVSCOPE_EVENTS=${endpoint} vllm serve MODEL`;
  }

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
      item.append(code, ` ${stateOf(source)}`);
      return item;
    });
    list.replaceChildren(...items);
    probeCommand(sources);
    const wrong = sources.filter((source) => source.error);
    banner.hidden = wrong.length === 0;
    banner.textContent = wrong.map((source) => source.error.startsWith(source.target)
      ? source.error : `${source.target} cannot be read: ${source.error}`).join(" ");
  }

  // ------------------------------------------------------------------ the block map

  let block = null;
  let sentBlock = null;
  let pointing = "";
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
        if (block !== sentBlock) sendPoint();
      }, POINT_MS);
    }
  }

  // Also sent with each page that arrives, so that the pointed block matches it.
  function sendPoint() {
    sentBlock = block;
    setProps("pointed", { data: { block, pointing, at: receivedAt } });
  }

  function openHistory(of) {
    const asked = new URLSearchParams(location.search);
    asked.set("engine", engine);
    asked.set("id", String(of));
    go("/block", `?${asked}`);
  }

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
      openHistory(at);
    }
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      const menu = document.querySelector("details.menu[open]");
      const close = document.querySelector("#aside .close");
      if (menu) {
        menu.open = false;
        menu.firstElementChild.focus();
      } else if (close && !byId("keys").open) close.click();
      point(null);
      return;
    }
    if (pressed(event)) {
      event.preventDefault();
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
      openHistory(block);
    }
  });

  window.kvscopePage = { PushedData };
  kvscopePreferences.onChange(show);
  setInterval(checkService, 1000);
  setInterval(showSources, SOURCES_MS);
  const firstLook = setInterval(() => {
    if (!byId("sources")) return;
    clearInterval(firstLook);
    showSources();
  }, 50);
})();
