// The sign-in page, which the frontend sends if the page at / is requested without a valid API key.

const KEY = "nereid-api-key";

/**
 * Replace this page by the playground.
 * @param {string} key The API key. The playground reads it from the storage of this browser tab.
 * @returns {Promise<boolean>} false if the frontend does not accept the key.
 */
async function openPlayground(key) {
  const response = await fetch("", { headers: { Authorization: `Bearer ${key}` } });
  if (!response.ok) {
    sessionStorage.removeItem(KEY);
    return false;
  }
  sessionStorage.setItem(KEY, key);
  const page = await response.text();
  document.open();
  document.write(page);
  document.close();
  return true;
}

document.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = document.querySelector("#key");
  const error = document.querySelector(".error");
  error.textContent = "";
  try {
    if (!(await openPlayground(field.value))) {
      error.textContent = "The server does not accept this key.";
      field.focus();
    }
  } catch {
    error.textContent = "The server does not answer.";
  }
});

const storedKey = sessionStorage.getItem(KEY);
if (!storedKey || !(await openPlayground(storedKey).catch(() => false))) {
  document.querySelector("#key").focus();
}
