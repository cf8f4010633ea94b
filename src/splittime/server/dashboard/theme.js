/** Dark, light, or as the system has it; kept for the next visit. A plain script, so that it runs before the first paint. */
"use strict";
{
  const KEY = "splittime.theme";
  const CHOICES = ["auto", "light", "dark"];

  const stored = () => (CHOICES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto");

  const apply = (choice) => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
  };

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = stored();
    select.addEventListener("change", () => {
      localStorage.setItem(KEY, select.value);
      apply(select.value);
    });
  });
}
