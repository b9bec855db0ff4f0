// Uses every control of a map and sends what is wrong, and what lies beyond the window, to the page around it.
const problems = [];
addEventListener("error", event => problems.push(event.message));
addEventListener("load", () => {
  const check = (name, value) => { if (!value) problems.push(name); };
  const fits = name => {
    const width = document.documentElement.clientWidth;
    const total = document.documentElement.scrollWidth;
    check(`${name}: the page takes ${total} of ${width} px`, total <= width);
    for (const node of document.querySelectorAll("body *:not(script):not(style)")) {
      const box = node.getBoundingClientRect();
      if (node.closest("svg, .scroll, .hidden, option, #tip:not(.shown)") || !box.width) continue;
      const place = `${node.tagName} ${node.id} ${node.className} from ${box.left} to ${box.right}`;
      check(`${name}: ${place}`, box.right <= width + 0.5 && box.left >= -0.5);
    }
  };
  const press = key => $("stage").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const input = (id, value, event) => { $(id).value = value; $(id)["on" + event](); };
  const touch = (pointerId, type, x) => {
    const box = $("map").getBoundingClientRect(), clientX = box.left + W / 2 + x, clientY = box.top + W / 2;
    const options = { pointerId, pointerType: "touch", clientX, clientY, bubbles: true };
    $("stage").dispatchEvent(new PointerEvent(type, options));
  };
  fits("first view");
  check("points", document.querySelectorAll(".point").length === NUM_POINTS);
  input("query", "blue circ", "input");
  check("search", $("matches").textContent.startsWith(`${DATA.texts.filter(text => text.includes("blue")).length} of`));
  check("dim", document.querySelector(".point.dim"));
  input("query", "", "input");
  check("bold text stays text", !document.querySelector("li b"));
  for (const label of document.querySelectorAll("input[name=model]")) {
    label.click();
    check(`way of ${model().name}`, document.querySelectorAll(".waydot").length === DATA.models[0].radii[0].length);
    if (model().cones.length) { input("filter", 1, "change"); check("filter", walk().min_radius !== null); }
    input("slider", 2, "input");
    check("step", state.step === 2 && document.querySelector("#stops [aria-current]"));
    if (coneText() !== null) check("cone", document.querySelector(".cone") && !$("map").innerHTML.includes("NaN"));
    for (const layout of [...document.querySelectorAll("input[name=layout]")].map(node => node.value)) {
      document.querySelector(`input[name=layout][value=${layout}]`).click();
      check(`share of ${layout}`, /\d+ % of the ten nearest/.test($("how").textContent));
      check(`numbers of ${layout}`, !/NaN|undefined/.test($("map").innerHTML + document.querySelector("main").innerText));
      fits(`${model().name}, ${layout}`);
      if (layout === "clusters") check("path", document.querySelector(".path"));
    }
    document.querySelector("input[name=layout][value=polar]").click();
    const before = position(0), middle = [W / 2, W / 2];
    press("+");
    check("zoom", Math.abs(position(0)[0] - W / 2 - 1.5 * (before[0] - W / 2)) < 1e-6);
    press("0");
    touch(1, "pointerdown", -20);
    touch(2, "pointerdown", 20);
    touch(2, "pointermove", 60);
    check(`pinch zooms by ${state.zoom}`, Math.abs(state.zoom - 2) < 1e-6);
    touch(1, "pointerup", 0);
    touch(2, "pointerup", 0);
    press("0");
    press("ArrowUp");
    check("arrow", state.hot !== null && $("spoken").textContent.includes("from the root"));
    fits("tip");
    press("Enter");
    press("Escape");
    check("escape", state.hot === null);
  }
  document.querySelector("input[name=colour][value=class]").click();
  $("next").click();
  document.querySelector("details").open = true;
  fits("last view");
  parent.postMessage({ width: innerWidth, problems }, "*");
});
