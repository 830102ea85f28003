const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest && event.target.closest("[data-tip]");
  tip.style.display = mark ? "block" : "none";
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const width = tip.offsetWidth;
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
});
