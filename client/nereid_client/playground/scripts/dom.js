// Functions that create and find elements.
//
// The frontend joins all scripts of the playground into one module in the order of their names in
// `SCRIPTS` (nereid_client/playground/__init__.py), so that they share their top-level names.

/** Return the element with this id. */
function byId(id) {
  return document.getElementById(id);
}

/**
 * Create an element.
 * @param {string} tag The name of the element.
 * @param {object} properties Properties of the element; `dataset` and `aria` are objects.
 * @param {...(Node|string)} children The content of the element. Text is never parsed as HTML.
 * @returns {HTMLElement}
 */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  const { dataset = {}, aria = {}, ...others } = properties;
  Object.assign(element, others);
  Object.assign(element.dataset, dataset);
  for (const [name, value] of Object.entries(aria)) {
    element.setAttribute(`aria-${name}`, value);
  }
  element.append(...children);
  return element;
}

/** Create a button that calls a function. */
function makeButton(label, onClick, properties = {}) {
  const button = make("button", { type: "button", textContent: label, ...properties });
  button.addEventListener("click", onClick);
  return button;
}

/** Show a short message to everybody, and let screen readers read it aloud. */
function announce(text) {
  byId("status").textContent = text;
}

/** Show or remove the error of a field. An empty text removes the error. */
function showFieldError(field, text) {
  byId(`${field.id}-error`).textContent = text;
  field.setAttribute("aria-invalid", String(Boolean(text)));
}

/** Return the lines of a text that are not blank. */
function linesOf(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

/**
 * Move the focus among a group of elements with the arrow keys, Home and End.
 *
 * Only one element of the group is in the tab order: the one that had the focus last.
 * @param {HTMLElement} group The parent of the elements.
 * @param {string} selector Selects the elements in the group.
 */
function addArrowKeys(group, selector) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  group.addEventListener("keydown", (event) => {
    const items = [...group.querySelectorAll(selector)];
    const current = items.indexOf(document.activeElement);
    let next = current + (steps[event.key] ?? 0);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = items.length - 1;
    if (current < 0 || next === current || !items[next]) return;
    event.preventDefault();
    items[current].tabIndex = -1;
    items[next].tabIndex = 0;
    items[next].focus();
  });
}
