// Where the screen is narrow, one part of the page at a time.

import { at } from "./dom.js";

const tabs = () => [...at("tabs").querySelectorAll("[role=tab]")];

/** Show a part of the page; on a wide screen all of them are shown anyhow. */
export function showTab(name) {
  document.body.dataset.tab = name;
  for (const tab of tabs()) tab.setAttribute("aria-selected", tab.dataset.tab === name);
}

export function listenToTabs() {
  for (const tab of tabs()) tab.addEventListener("click", () => showTab(tab.dataset.tab));
  showTab(document.body.dataset.tab);
}
