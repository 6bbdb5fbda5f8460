"use strict";
// Only comfort: a read-out under the pointer, and open details on paper. The page is complete without it.
for (const plot of document.querySelectorAll(".plot[data-series]")) {
  const chart = JSON.parse(plot.dataset.series);
  const svg = plot.querySelector("svg");
  const hair = document.createElement("div");
  const readout = document.createElement("div");
  hair.className = "hair";
  readout.className = "readout";
  const leave = () => { hair.remove(); readout.remove(); };
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    if (share < 0 || share > 1) { leave(); return; }
    const x = chart.x.low + share * (chart.x.high - chart.x.low);
    const words = chart.series.map((one) => {
      const found = one.shape === "steps"
        ? one.points.filter((point) => point[0] <= x).pop() ?? one.points[0]
        : one.points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
      return `${one.label} ${found[1].toLocaleString("en", { maximumSignificantDigits: 4 })}`;
    });
    readout.textContent = `${x.toLocaleString("en", { maximumSignificantDigits: 3 })}: ${words.join(", ")} ${chart.unit}`;
    hair.style.left = `${event.clientX - plot.getBoundingClientRect().left}px`;
    plot.append(hair, readout);
  });
}
const closed = [];
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) { details.open = true; closed.push(details); }
});
addEventListener("afterprint", () => { for (const details of closed.splice(0)) details.open = false; });
