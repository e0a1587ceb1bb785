// The view of the embedding model: the cosine similarities of several texts.

/** Return the cosine of the angle between two vectors. */
function cosine(a, b) {
  let dot = 0;
  let squaresOfA = 0;
  let squaresOfB = 0;
  a.forEach((value, index) => {
    dot += value * b[index];
    squaresOfA += value * value;
    squaresOfB += b[index] * b[index];
  });
  return dot / Math.sqrt(squaresOfA * squaresOfB || 1);
}

/**
 * Create a table with the similarity of each pair of texts.
 *
 * The least similar pair has no shade and equal vectors have the strongest shade, because many
 * models give all pairs of texts a high similarity.
 */
function similarityTable(texts, vectors, model) {
  const similarities = vectors.map((a) => vectors.map((b) => cosine(a, b)));
  const lowest = Math.min(...similarities.flat());
  const head = make("tr", {}, make("td"));
  texts.forEach((_, index) => head.append(make("th", { scope: "col", textContent: index + 1 })));
  const rows = texts.map((text, index) => {
    const row = make("tr", {}, make("th", { scope: "row", textContent: `${index + 1}. ${text}` }));
    for (const similarity of similarities[index]) {
      const rounded = Math.round(similarity * 100) / 100 + 0; // "+ 0" converts -0 to 0
      const cell = make("td", { className: "similarity", textContent: rounded.toFixed(2) });
      const share = (similarity - lowest) / (1 - lowest || 1);
      cell.style.setProperty("--similar", `${Math.round(share * 50)}%`);
      row.append(cell);
    }
    return row;
  });
  const caption = `Cosine similarities, ${vectors[0].length} dimensions, model ${model}`;
  return make(
    "table",
    {},
    make("caption", { textContent: caption }),
    make("thead", {}, head),
    make("tbody", {}, ...rows),
  );
}

/**
 * Let a form send a request and show its result.
 * @param {string} view The id of the view, which contains the form.
 * @param {function(): object|null} readBody Returns the body of the request, or null to send none.
 * @param {string} path The path of the request.
 * @param {function(object, object): HTMLElement} show Creates the result from body and answer.
 */
function startForm(view, readBody, path, show) {
  const form = byId(`${view}-form`);
  const error = byId(view).querySelector(".error");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    error.textContent = "";
    const body = readBody();
    if (!body) return;
    const button = form.querySelector("[type=submit]");
    button.disabled = true;
    try {
      const answer = await (await send(path, body)).json();
      byId(view).querySelector(".result").replaceChildren(show(body, answer));
      announce("The result is complete.");
    } catch (problem) {
      error.textContent = problem.message;
    }
    button.disabled = false;
  });
}

function startEmbeddings() {
  const readBody = () => {
    const input = linesOf(byId("texts").value);
    return input.length ? { input, encoding_format: "float" } : null;
  };
  startForm("embeddings", readBody, "v1/embeddings", (body, answer) =>
    similarityTable(body.input, answer.data.map((item) => item.embedding), answer.model),
  );
}
