// Requests to the frontend that served this page.

const API_KEY = sessionStorage.getItem("nereid-api-key");

/**
 * Send a request with the API key.
 * @param {string} path A path without a leading slash, so that the page also works below a prefix.
 * @param {object} [body] The JSON body of a POST. Without a body, a GET is sent.
 * @param {AbortSignal} [signal] Cancels the request.
 * @returns {Promise<Response>}
 * @throws {Error} with the message of the server if the status is not 2xx.
 */
async function send(path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (API_KEY) headers.Authorization = `Bearer ${API_KEY}`;
  const method = body ? "POST" : "GET";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer.");
  }
  if (!response.ok) throw new Error(await errorMessage(response));
  return response;
}

/** Return the message of an error response. */
async function errorMessage(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered with the status ${response.status}.`;
  }
}

/**
 * Yield the JSON objects of a stream of server-sent events until `[DONE]`.
 * @param {Response} response
 * @throws {Error} with the message of an error event.
 */
async function* eventsOf(response) {
  let rest = "";
  for await (const text of textsOf(response)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Yield the body of a response as pieces of text. */
async function* textsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      yield part.value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
