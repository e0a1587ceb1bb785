// The editor of the JSON schema for structured output: a list of fields, and the schema as text.
//
// The text is what the request contains. A change of a field changes only that property in the text,
// so that the text may contain parts that the list of fields cannot show.

const FIELD_TYPES = {
  text: { type: "string" },
  integer: { type: "integer" },
  number: { type: "number" },
  "yes or no": { type: "boolean" },
  "list of texts": { type: "array", items: { type: "string" } },
  "list of numbers": { type: "array", items: { type: "number" } },
};
const OTHER_TYPE = "see the JSON";

/**
 * Return the schema in the text field.
 * @returns {object|null} null if the text is not a JSON object. The page then shows an error.
 */
function readSchema() {
  const field = byId("schema");
  try {
    const schema = JSON.parse(field.value);
    if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
      throw new SyntaxError("The schema must be a JSON object.");
    }
    showFieldError(field, "");
    return schema;
  } catch (error) {
    showFieldError(field, error.message);
    return null;
  }
}

function writeSchema(schema) {
  byId("schema").value = JSON.stringify(schema, null, 2);
  showFieldError(byId("schema"), "");
}

/** Return the name in FIELD_TYPES for a property, or OTHER_TYPE. */
function fieldTypeOf(property) {
  const { description: _, ...rest } = property;
  const text = JSON.stringify(rest);
  const found = Object.entries(FIELD_TYPES).find(([, type]) => JSON.stringify(type) === text);
  return found ? found[0] : OTHER_TYPE;
}

/** Show one row for each property of the schema. */
function showFields() {
  const schema = readSchema();
  if (!schema) return;
  const rows = Object.entries(schema.properties ?? {}).map(([name, property]) =>
    fieldRow(name, property, (schema.required ?? []).includes(name)),
  );
  byId("schema-fields").replaceChildren(...rows);
}

/** Create the row of a property: its name, its type, whether it is required, and a button. */
function fieldRow(name, property, isRequired) {
  const row = make("li", { className: "schema-field" });
  const nameField = make("input", { type: "text", value: name, aria: { label: "Field name" } });
  const type = fieldTypeOf(property);
  const typeField = make("select", { aria: { label: `Type of ${name}` } });
  for (const label of [...Object.keys(FIELD_TYPES), ...(type === OTHER_TYPE ? [type] : [])]) {
    typeField.append(make("option", { textContent: label, selected: label === type }));
  }
  const required = make("input", { type: "checkbox", checked: isRequired });
  nameField.addEventListener("change", () => changeField(name, { name: nameField.value.trim() }));
  typeField.addEventListener("change", () => changeField(name, { type: typeField.value }));
  required.addEventListener("change", () => changeField(name, { isRequired: required.checked }));
  const remove = makeButton("Remove", () => changeField(name, { isRemoved: true }), {
    aria: { label: `Remove ${name}` },
  });
  row.append(nameField, typeField, make("label", { className: "check" }, required, " required"));
  row.append(remove);
  return row;
}

/**
 * Change one property of the schema, and keep the order of the properties.
 * @param {string} name The present name of the property.
 * @param {object} change At least one of: name, type (a key of FIELD_TYPES), isRequired, isRemoved.
 */
function changeField(name, change) {
  const schema = readSchema();
  if (!schema) return;
  const newName = change.name || name;
  const isTaken = newName !== name && newName in schema.properties;
  if (isTaken) announce(`The schema already has the field ${newName}.`);
  const finalName = isTaken ? name : newName;
  const entries = Object.entries(schema.properties)
    .filter(([key]) => key !== name || !change.isRemoved)
    .map(([key, property]) => [
      key === name ? finalName : key,
      key === name && FIELD_TYPES[change.type] ? FIELD_TYPES[change.type] : property,
    ]);
  const wasRequired = (schema.required ?? []).includes(name);
  const isRequired = !change.isRemoved && (change.isRequired ?? wasRequired);
  schema.properties = Object.fromEntries(entries);
  schema.required = (schema.required ?? []).filter((key) => key !== name);
  if (isRequired) schema.required.push(finalName);
  writeSchema(schema);
  showFields();
}

/** Add a required text field with an unused name, and move the focus to its name. */
function addField() {
  const schema = readSchema();
  if (!schema) return;
  schema.properties ??= {};
  let number = Object.keys(schema.properties).length + 1;
  while (`field_${number}` in schema.properties) number += 1;
  schema.properties[`field_${number}`] = FIELD_TYPES.text;
  schema.required = [...(schema.required ?? []), `field_${number}`];
  writeSchema(schema);
  showFields();
  byId("schema-fields").querySelector("li:last-child input").select();
}

function startSchemaEditor() {
  writeSchema({
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" } },
    required: ["name", "age"],
    additionalProperties: false,
  });
  showFields();
  byId("schema").addEventListener("input", showFields);
  byId("add-field").addEventListener("click", addField);
}
