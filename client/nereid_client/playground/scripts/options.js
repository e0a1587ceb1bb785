// The options of the chat: the fields of the request besides its messages.

const NUMBER_OPTIONS = ["temperature", "top_p", "max_tokens", "seed"];
const TOP_LOGPROBS = 5;
const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather for a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

/**
 * Return the fields of the request that the options determine.
 * @returns {object|null} null if an option has a wrong value. The page then shows an error.
 */
function readOptions() {
  const fields = { model: byId("model").value };
  for (const name of NUMBER_OPTIONS) {
    if (byId(name).value) fields[name] = Number(byId(name).value);
  }
  if (byId("thinking").value) fields.thinking = { type: byId("thinking").value };
  if (byId("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  const tools = readTools();
  const format = readFormat();
  if (!tools || !format) {
    byId("options").open = true;
    byId("options").querySelector("[aria-invalid=true]")?.focus();
    return null;
  }
  return { ...fields, ...tools, ...format };
}

/** Return the fields tools and tool_choice, or null if the tools are not a JSON list. */
function readTools() {
  const field = byId("tools");
  showFieldError(field, "");
  if (!field.value.trim()) return {};
  try {
    const tools = JSON.parse(field.value);
    if (!Array.isArray(tools)) throw new SyntaxError("The tools must be a JSON list.");
    return tools.length ? { tools, tool_choice: byId("tool_choice").value } : {};
  } catch (error) {
    showFieldError(field, error.message);
    return null;
  }
}

/** Return the field for the form of the answer, or null if the schema is not a JSON object. */
function readFormat() {
  const format = byId("format").value;
  if (!format) return {};
  if (format === "regex") return { regex: byId("regex").value };
  if (format === "json_object") return { response_format: { type: "json_object" } };
  const schema = readSchema();
  if (!schema) return null;
  const jsonSchema = { name: "answer", strict: true, schema };
  return { response_format: { type: "json_schema", json_schema: jsonSchema } };
}

function startOptions() {
  // On a narrow screen, the conversation comes first.
  if (matchMedia("(max-width: 60rem)").matches) byId("options").open = false;
  byId("format").addEventListener("change", () => {
    byId("schema-editor").hidden = byId("format").value !== "json_schema";
    byId("regex-label").hidden = byId("format").value !== "regex";
  });
  byId("example-tool").addEventListener("click", () => {
    byId("tools").value = JSON.stringify([EXAMPLE_TOOL], null, 2);
    showFieldError(byId("tools"), "");
  });
}
