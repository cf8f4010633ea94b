/** Making elements. Text is only ever set as text: nothing here, or anywhere on this page, parses HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (`class`, `aria-label`, ...), listeners (`onclick`: a function) and children. */
export function el(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

/** The same, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an element's text, without touching the page if it is that already. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show or hide without moving what stands beside it. */
export function show(element, isShown) {
  element.hidden = !isShown;
}

export const byId = (id) => document.getElementById(id);
