// The view of the reranker: documents in the order of their relevance to a query.

/** Create a table with the ranked documents. */
function rankingTable(answer) {
  const head = ["Rank", "Score", "Document"].map((name) =>
    make("th", { scope: "col", textContent: name }),
  );
  const rows = answer.results.map((result, index) => {
    const score = make("td", {}, result.relevance_score.toFixed(3));
    return make(
      "tr",
      {},
      make("td", { textContent: index + 1 }),
      score,
      make("th", { scope: "row", textContent: result.document.text }),
    );
  });
  return make(
    "table",
    { className: "ranking" },
    make("caption", { textContent: `Documents by relevance, model ${answer.model}` }),
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...rows),
  );
}

function startRerank() {
  const readBody = () => {
    const documents = linesOf(byId("documents").value);
    const query = byId("query").value.trim();
    return documents.length && query ? { query, documents, return_documents: true } : null;
  };
  startForm("rerank", readBody, "v1/rerank", (_, answer) => rankingTable(answer));
}
