"use strict";
// Values under the pointer, and by arrow keys. Without this, browsers show each mark's
// <title>, and the tables have everything.
for (const plot of document.querySelectorAll(".plot")) {
  const svg = plot.querySelector("svg");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  plot.append(tip);
  const marks = svg.dataset.cells ? cellsOf(plot, svg) : marksOf(svg);
  if (!marks.length) continue;
  let now = -1;

  function show(i) {
    if (now >= 0 && marks[now].element) marks[now].element.classList.remove("on");
    now = i;
    if (i < 0) { tip.textContent = ""; return; }
    const { x, y, text, element } = marks[i];
    if (element) element.classList.add("on");
    if (tip.textContent !== text) tip.textContent = text;
    const scale = svg.clientWidth / svg.viewBox.baseVal.width;
    const left = Math.min(Math.max(0, x * scale - tip.offsetWidth / 2),
      Math.max(0, plot.clientWidth - tip.offsetWidth));
    const above = y * scale - tip.offsetHeight - 12;
    tip.style.left = `${left}px`;
    tip.style.top = `${above < -30 ? y * scale + 14 : above}px`;
  }

  function nearest(event) {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    if (svg.dataset.cells) {
      return marks.findIndex((m) => x >= m.x0 && x < m.x1 && y >= m.y0 && y < m.y1);
    }
    let best = -1, least = 40 * 40;
    marks.forEach((mark, i) => {
      const far = (mark.x - x) ** 2 + (mark.y - y) ** 2;
      if (far < least) { least = far; best = i; }
    });
    return best;
  }

  plot.addEventListener("pointermove", (event) => show(nearest(event)));
  plot.addEventListener("pointerdown", (event) => show(nearest(event)));
  plot.addEventListener("pointerleave", () => show(-1));
  plot.addEventListener("blur", () => show(-1));
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", "Chart; arrow keys read its values");
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") show(-1);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(marks.length - 1);
    else if (step) show((now + step + marks.length) % marks.length);
    else return;
    event.preventDefault();
  });
}

function marksOf(svg) {
  return [...svg.querySelectorAll("title")].map((title) => {
    const element = title.parentNode;
    const [x, y] = ["x", "y"].map((name) => Number(element.getAttribute(name)));
    title.remove();
    return { x, y, text: title.textContent, element };
  });
}

function cellsOf(plot, svg) {
  const [left, top, wide, tall] = svg.dataset.cells.split(" ").map(Number);
  const table = plot.closest("section").querySelector("table");
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  return [...table.tBodies[0].rows].flatMap((row, i) =>
    [...row.cells].slice(1, -1).map((cell, j) => ({
      x0: left + j * wide, x1: left + (j + 1) * wide,
      y0: top + i * tall, y1: top + (i + 1) * tall,
      x: left + (j + 0.5) * wide, y: top + i * tall,
      text: `client ${row.cells[0].textContent}, class ${heads[j + 1]}: ` +
        `${cell.textContent} of ${row.cells[row.cells.length - 1].textContent} examples`,
    })));
}

// Tables that are cut off say so.
function markCut() {
  for (const box of document.querySelectorAll(".scroll")) {
    box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
  }
}
addEventListener("resize", markCut);
addEventListener("toggle", markCut, true);
markCut();
