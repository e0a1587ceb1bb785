// The tabs, the theme, the names of the models, and the start of all views.

const THEME = "nereid-theme";

/** Show the view of a tab and hide the other views. */
function selectTab(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const isSelected = other === tab;
    other.setAttribute("aria-selected", String(isSelected));
    other.tabIndex = isSelected ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isSelected;
  }
  announce("");
}

function startTabs() {
  const list = document.querySelector("[role=tablist]");
  addArrowKeys(list, "[role=tab]");
  for (const tab of list.children) {
    tab.addEventListener("click", () => selectTab(tab));
    tab.addEventListener("focus", () => tab.matches(":focus-visible") && tab.click());
  }
  selectTab(list.firstElementChild);
}

/** Apply the theme that the user chose last, in this browser. */
function startTheme() {
  const field = byId("theme");
  const apply = () => {
    document.documentElement.style.colorScheme = field.value;
    localStorage.setItem(THEME, field.value);
  };
  field.value = localStorage.getItem(THEME) ?? "light dark";
  field.addEventListener("change", apply);
  apply();
}

async function showModels() {
  try {
    const { data } = await (await send("v1/models")).json();
    byId("model").append(...data.map((model) => make("option", { textContent: model.id })));
  } catch (error) {
    announce(error.message);
  }
}

startTheme();
startTabs();
startSchemaEditor();
startOptions();
startChat();
startImages();
startEmbeddings();
startRerank();
startTemplate();
startGauges();
showModels();
byId("prompt").focus();
