// The elements that show one message of the conversation.

const ROLE_LABELS = { user: "You", assistant: "Model", tool: "Tool result" };

/** Shows a message that is being generated, and adds each delta without a new layout of the rest. */
class AnswerView {
  constructor() {
    this.reasoning = make("pre", { className: "text" });
    this.reasoningBox = make("details", { className: "reasoning", hidden: true });
    this.reasoningBox.append(make("summary", { textContent: "Reasoning" }), this.reasoning);
    this.content = make("pre", { className: "text" });
    this.calls = make("div", { className: "calls" });
    this.tokens = new TokenView();
    this.footer = make("p", { className: "note" });
    this.error = make("p", { className: "error", role: "alert" });
    this.actions = make("div", { className: "actions" });
    this.element = messageElement("assistant");
    this.element.append(this.reasoningBox, this.content, this.calls, this.tokens.element);
    this.element.append(this.error, this.footer, this.actions);
    this.element.setAttribute("aria-busy", "true");
  }

  addReasoning(text) {
    this.reasoningBox.hidden = false;
    this.reasoning.append(text);
  }

  addContent(text) {
    this.content.append(text);
  }

  /**
   * Show the tool calls of a complete message.
   * @param {object[]} calls The tool calls in the format of a chat completion.
   * @param {function(string[]): void} [onResults] Is called with the results that the user entered.
   */
  showCalls(calls, onResults) {
    const boxes = calls.map(callElement);
    this.calls.replaceChildren(...boxes.map((box) => box.element));
    if (!onResults) return;
    const submit = makeButton("Send the results", () => {
      for (const { result } of boxes) result.readOnly = true;
      submit.remove();
      onResults(boxes.map(({ result }) => result.value));
    });
    this.calls.append(submit);
    for (const { label } of boxes) label.hidden = false;
    boxes[0].result.focus();
  }

  /** Mark the message as complete, and show what is known about its generation. */
  finish(facts) {
    this.element.setAttribute("aria-busy", "false");
    this.footer.textContent = facts.filter(Boolean).join(" · ");
  }
}

/** Create the element of a message without its content. */
function messageElement(role) {
  const heading = make("h2", { textContent: ROLE_LABELS[role] });
  return make("article", { className: `message ${role}` }, heading);
}

/** Create the elements of a tool call: its name, its text, and a field for its result. */
function callElement(call) {
  const name = (call.function ?? call.custom).name;
  const text = call.function
    ? prettyJson(call.function.arguments)
    : make("pre", { className: "code", textContent: call.custom.input, tabIndex: 0 });
  const heading = make("h3", { textContent: `Call of ${name}` });
  const result = make("textarea", { className: "code", rows: 2, spellcheck: false });
  const label = make("label", { hidden: true }, `Result of ${name} `, result);
  const element = make("section", { className: "call" }, heading, text, label);
  return { element, result, label };
}

/** Create a block with a JSON text on several lines. A text that is not JSON is shown unchanged. */
function prettyJson(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // The answer was cut off in the middle of the JSON text.
  }
  return make("pre", { className: "code", textContent: shown, tabIndex: 0 });
}

/**
 * Shows each generated token, shaded by its probability.
 *
 * The arrow keys select a token. The line below the tokens then shows the most likely tokens at its
 * position with their probabilities, so that the shading is not the only sign of a probability.
 */
class TokenView {
  constructor() {
    this.list = make("div", { className: "tokens", role: "toolbar" });
    this.list.setAttribute("aria-label", "Tokens, shaded by their probabilities");
    this.alternatives = make("p", { className: "note", role: "status" });
    this.element = make("details", { className: "token-box", hidden: true, open: true });
    this.element.append(make("summary", { textContent: "Token probabilities" }));
    this.element.append(this.list, this.alternatives);
    addArrowKeys(this.list, "button");
  }

  /** Add tokens: entries of the field logprobs.content of a chunk. */
  add(entries) {
    this.element.hidden = false;
    for (const entry of entries) {
      const probability = Math.exp(entry.logprob);
      const text = entry.token.replaceAll("\n", "⏎");
      const token = makeButton(text, () => this.show(entry), {
        className: "token",
        tabIndex: this.list.firstChild ? -1 : 0,
        aria: { label: `${visible(entry.token)}, ${percent(probability)}` },
      });
      token.style.setProperty("--unlikely", `${Math.round((1 - probability) * 60)}%`);
      token.classList.toggle("improbable", probability < 0.5);
      token.addEventListener("focus", () => this.show(entry));
      this.list.append(token, ...(text === entry.token ? [] : [make("br")]));
    }
  }

  show(entry) {
    const tops = entry.top_logprobs.length ? entry.top_logprobs : [entry];
    const shown = tops.map((top) => `${visible(top.token)} ${percent(Math.exp(top.logprob))}`);
    this.alternatives.textContent =
      `${visible(entry.token)} has ${percent(Math.exp(entry.logprob))}. ` +
      `The most likely tokens: ${shown.join(", ")}`;
  }
}

/** Return a token as text in which white space is visible. Example: " a\n" returns "␣a⏎". */
function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎") || "(no text)";
}

/** Return a share as a percentage. Example: 0.1234 returns "12.3 %". */
function percent(share) {
  return `${(share * 100).toFixed(1)} %`;
}
