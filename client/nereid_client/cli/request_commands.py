"""`nereid complete`, `embed`, `rerank` and `models`: send one request to a running server."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nereid_client.cli.api_client import (
    Json,
    base_url,
    events_of,
    fetch_from_openai_api,
    first_model,
    send,
)
from nereid_client.cli.output import (
    DEFAULT_URL,
    JsonOption,
    ModelOption,
    UrlOption,
    print_json,
    print_table,
    read_stdin,
    texts_or_stdin,
    write_model_text,
)
from nereid_client.console import CliError, say

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SHORTEST_LENGTH = 1e-12  # prevents a division by zero for a vector of zeros


def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue. The default is the standard input.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(help="The largest number of tokens.")] = 100,
    temperature: Annotated[float | None, typer.Option(help="The sampling temperature.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, without a chat template."""
    server = base_url(url)
    text = read_stdin() if prompt is None else prompt
    body: Json = {
        "model": model or first_model(server),
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    if as_json:
        print_json(fetch_from_openai_api(f"{server}/v1/completions", body, "choices"))
        return
    with send(f"{server}/v1/completions", body | {"stream": True}) as response:
        for event in events_of(response):
            for choice in event["choices"]:
                write_model_text(choice["text"])
                sys.stdout.flush()
    say()  # ends the line on the standard output


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(help="The texts. The default is the standard input.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute vectors of texts, and print their cosine similarities."""
    # Importing numpy takes a tenth of a second. The import is inside this function, so that other
    # commands start without this delay.
    import numpy as np

    given = texts_or_stdin(texts or [])
    if not as_json:
        _check_width_of_similarities(len(given))
    body: Json = {"input": given} | ({"model": model} if model else {})
    answer = fetch_from_openai_api(f"{base_url(url)}/v1/embeddings", body)
    if as_json:
        print_json(answer)
        return
    vectors = np.array([item["embedding"] for item in answer["data"]], dtype=np.float64)
    numbers = range(1, len(given) + 1)
    columns = ["", "text", *map(str, numbers)]
    rows = [
        [number, text, *similarities]
        for number, text, similarities in zip(
            numbers, given, _cosine_similarities(vectors), strict=True
        )
    ]
    title = f"Cosine similarities, {vectors.shape[1]} dimensions, model {answer['model']}"
    print_table(columns, rows, title)


def _check_width_of_similarities(num_texts: int) -> None:
    """Raise a CliError if a table with one column for each text is wider than the terminal.

    The library rich would leave out the numbers of such a table.
    """
    width = Console().width
    # The table has one column for each text, a column with the numbers of the texts, and a column
    # with the texts. Each of these columns is at least four characters wide: a border, two spaces,
    # and one character of the value. The right border of the table is one more character.
    limit = (width - 1) // 4 - 2
    if num_texts > limit:
        raise CliError(
            f"The table of the similarities of {num_texts} texts does not fit into the {width} "
            f"columns of the terminal. Give at most {limit} texts, or print the vectors with "
            "--json."
        )


def _cosine_similarities(vectors: "npt.NDArray[np.float64]") -> list[list[float]]:
    """Return the cosine similarity of each pair of vectors, as a matrix with one row per vector.

    Args:
        vectors: [num_vectors, dimension].
    """
    import numpy as np

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit_vectors = vectors / np.maximum(lengths, _SHORTEST_LENGTH)
    similarities: list[list[float]] = (unit_vectors @ unit_vectors.T).tolist()
    return similarities


def rerank(
    query: Annotated[str, typer.Argument(help="The text to compare the documents with.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help="The documents. The default is the standard input.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sort documents by their relevance to a query."""
    given = texts_or_stdin(documents or [])
    body: Json = {"query": query, "documents": given} | ({"model": model} if model else {})
    answer = fetch_from_openai_api(f"{base_url(url)}/v1/rerank", body, "results")
    if as_json:
        print_json(answer)
        return
    rows = [
        [rank, float(result["relevance_score"]), given[result["index"]]]
        for rank, result in enumerate(answer["results"], start=1)
    ]
    print_table(["rank", "score", "document"], rows, f"Model {answer['model']}")


def models(url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the models that a server serves."""
    answer = fetch_from_openai_api(f"{base_url(url)}/v1/models")
    if as_json:
        print_json(answer)
        return
    print_table(["model", "owner"], [[m["id"], m.get("owned_by", "")] for m in answer["data"]])
