// The chat: the messages of the conversation, and the requests for the answers of the model.

/**
 * A message of the conversation.
 * @typedef {object} Entry
 * @property {string} role "user", "assistant" or "tool".
 * @property {object} message The message in the format of a chat completion.
 * @property {HTMLElement} element The element that shows the message.
 */

/** @type {Entry[]} */
let conversation = [];
/** @type {AbortController|null} The controller of the running request, if there is one. */
let running = null;

/** Add a message to the conversation and to the page. */
function addEntry(role, message, element) {
  conversation.push({ role, message, element });
  byId("log").append(element);
  element.scrollIntoView({ block: "nearest" });
}

/** Remove all messages from an index on, in the conversation and on the page. */
function truncateConversation(index) {
  for (const { element } of conversation.splice(index)) element.remove();
}

/** Add a message of the user, with a button that edits its text. */
function addUserMessage(text, images) {
  const element = messageElement("user");
  const content = make("pre", { className: "text", textContent: text });
  const edit = makeButton("Edit", () => editMessage(element, text, images));
  element.append(...images.map(imageElement), content, make("div", { className: "actions" }, edit));
  addEntry("user", { role: "user", content: contentWithImages(images, text) }, element);
}

/**
 * Replace a message of the user by a form in which the user edits the text. When the user sends the
 * form, the message gets the new text and keeps its images. All later messages are removed.
 */
function editMessage(element, text, images) {
  if (running) return;
  const [heading, ...shown] = element.children;
  const field = make("textarea", { value: text, rows: 3, aria: { label: "Edited message" } });
  const save = make("button", { type: "submit", className: "primary", textContent: "Send" });
  const cancel = makeButton("Cancel", () => element.replaceChildren(heading, ...shown));
  const form = make("form", {}, field, make("div", { className: "actions" }, save, cancel));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const options = readOptions();
    if (running || !options) return;
    truncateConversation(conversation.findIndex((entry) => entry.element === element));
    addUserMessage(field.value, images);
    generate(options);
  });
  element.replaceChildren(heading, form);
  field.focus();
}

/** Return the messages of the request. */
function requestMessages() {
  const system = byId("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...conversation.map((entry) => entry.message)];
}

/**
 * Request an answer to the conversation and show it while it is generated.
 * @param {object} options The other fields of the request, as returned by `readOptions`.
 */
async function generate(options) {
  const messages = requestMessages();
  const view = new AnswerView();
  const answer = { reasoning: "", content: "", calls: [], finish: null, usage: null };
  const times = { start: performance.now(), first: null };
  setRunning(new AbortController());
  for (const button of document.querySelectorAll(".regenerate")) button.remove();
  addEntry("assistant", { role: "assistant", content: "" }, view.element);
  const entry = conversation.at(-1);
  try {
    const body = { ...options, messages, stream: true, stream_options: { include_usage: true } };
    const response = await send("v1/chat/completions", body, running.signal);
    for await (const chunk of eventsOf(response)) {
      addChunk(chunk, answer, view, times);
    }
    if (!answer.finish) throw new Error("The connection ended before the answer was complete.");
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else view.error.textContent = error.message;
  }
  setRunning(null);
  entry.message = messageOf(answer);
  view.finish(factsOf(answer, times));
  showActions(view, answer, entry, options);
  announce(view.error.textContent ? "" : "The answer is complete.");
}

/** Return the element that scrolls the conversation: the whole page on a narrow screen. */
function scrollerOfLog() {
  const log = byId("log");
  return getComputedStyle(log).overflowY === "auto" ? log : document.scrollingElement;
}

/** Add one chunk of the stream to the answer and to the page. */
function addChunk(chunk, answer, view, times) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const scroller = scrollerOfLog();
  const isAtEnd = scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 40;
  const { delta } = choice;
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (times.first === null && (reasoning || delta.content || delta.tool_calls)) {
    times.first = performance.now();
  }
  if (reasoning) {
    answer.reasoning += reasoning;
    view.addReasoning(reasoning);
  }
  if (delta.content) {
    answer.content += delta.content;
    view.addContent(delta.content);
  }
  for (const piece of delta.tool_calls ?? []) addCallPiece(answer.calls, piece);
  if (delta.tool_calls) view.showCalls(answer.calls);
  if (choice.logprobs?.content) view.tokens.add(choice.logprobs.content);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}

/**
 * Add a piece of a tool call to the calls. The first piece has the id and the name.
 *
 * The model calls a function with arguments in JSON, and a custom tool with a text as input.
 */
function addCallPiece(calls, piece) {
  const [type, text] = piece.custom ? ["custom", "input"] : ["function", "arguments"];
  calls[piece.index] ??= { id: "", type, [type]: { name: "", [text]: "" } };
  const call = calls[piece.index];
  call.id ||= piece.id ?? "";
  call[type].name ||= piece[type].name ?? "";
  call[type][text] += piece[type][text] ?? "";
}

/** Return whether the tool calls of an answer are complete, so that they can have results. */
function hasCompleteCalls(answer) {
  return answer.calls.length > 0 && ["tool_calls", "stop"].includes(answer.finish);
}

/** Return an answer in the format of a request's message. Incomplete tool calls are left out. */
function messageOf(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.reasoning) {
    Object.assign(message, { reasoning: answer.reasoning, reasoning_content: answer.reasoning });
  }
  if (hasCompleteCalls(answer)) message.tool_calls = answer.calls;
  return message;
}

/** Return what is known about an answer: the reason of its end, its length and its speed. */
function factsOf(answer, times) {
  const elapsedS = (performance.now() - times.first) / 1000;
  const tokens = answer.usage?.completion_tokens;
  return [
    answer.finish && `finish_reason ${answer.finish}`,
    tokens && `${tokens} tokens`,
    tokens > 1 && times.first && `${((tokens - 1) / elapsedS).toFixed(0)} tokens/s`,
    times.first && `first token after ${Math.round(times.first - times.start)} ms`,
  ];
}

/** Add the fields for tool results and the button that generates the answer again. */
function showActions(view, answer, entry, options) {
  if (hasCompleteCalls(answer)) {
    view.showCalls(answer.calls, (results) => sendResults(answer.calls, results));
  }
  const regenerate = () => {
    const current = readOptions();
    if (running || !current) return;
    truncateConversation(conversation.indexOf(entry));
    generate(current);
  };
  view.actions.append(makeButton("Regenerate", regenerate, { className: "regenerate" }));
}

/** Add the results of tool calls to the conversation, and request the next answer. */
function sendResults(calls, results) {
  const options = readOptions();
  if (running || !options) return;
  calls.forEach((call, index) => {
    const element = messageElement("tool");
    element.append(make("pre", { className: "text", textContent: results[index] }));
    addEntry("tool", { role: "tool", tool_call_id: call.id, content: results[index] }, element);
  });
  generate(options);
}

/** Record the controller of the running request, or null, and enable the buttons for this state. */
function setRunning(controller) {
  running = controller;
  byId("stop").disabled = !controller;
  byId("composer").querySelector("[type=submit]").disabled = Boolean(controller);
}

/** Send the text and the images of the composer as a message. */
function sendPrompt() {
  const field = byId("prompt");
  const unanswered = conversation.at(-1)?.message.tool_calls;
  if (unanswered) {
    announce("Send the results of the tool calls first.");
    conversation.at(-1).element.querySelector("textarea")?.focus();
    return;
  }
  const options = readOptions();
  const isEmpty = !field.value.trim() && !attachedImages.length;
  if (running || isEmpty || !options) return;
  addUserMessage(field.value, takeAttachedImages());
  field.value = "";
  generate(options);
}

function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendPrompt();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    // During the input of Chinese or Japanese, Enter accepts a suggestion and must not send.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendPrompt();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    truncateConversation(0);
    takeAttachedImages();
    byId("prompt").focus();
  });
}
