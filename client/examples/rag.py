"""Answer a question from a list of passages with three models of one server.

The embedding model finds similar passages, the reranker sorts them, and the chat model answers.

    .venv/bin/python client/examples/rag.py "Who keeps a hedgehog?"

The passages below describe the invented world of the demo models. Use your own passages with
--passages FILE, where FILE has one passage per line. The example needs the packages `openai`,
`httpx` and `numpy`, which the environment `.venv` of this repository has.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

try:
    import httpx
    import numpy as np
    import numpy.typing as npt
    import openai
except ImportError as error:
    sys.exit(f"{error}. Run this example with .venv/bin/python, or: pip install openai httpx numpy")

PASSAGES = """\
Korvale is a city on the river Amber, famous for its bridges. Adela and Bram live there.
Saltmere is a city on the river Tidewater, famous for its harbour. Cleo and Dario live there.
Windhollow is a city on the river Grey, famous for its windmills. Elin and Farid live there.
Adela is a baker from Korvale. Adela has a cat, likes plum pie and enjoys chess.
Bram is a pilot from Korvale. Bram has a parrot, likes lentil soup and enjoys painting.
Cleo is a doctor from Saltmere. Cleo has a goat, likes grilled fish and enjoys sailing.
Dario is a carpenter from Saltmere. Dario has a dog, likes pumpkin bread and enjoys fishing.
Elin is a teacher from Windhollow. Elin has a hedgehog, likes mushroom stew and enjoys singing.
Farid is a miller from Windhollow. Farid has a donkey, likes fig jam and enjoys kite flying.
Elin has a hedgehog.
Bram has a parrot.
The river Tidewater flows through Saltmere.
"""


@dataclass(frozen=True)
class Found:
    """A passage, its cosine similarity to the question, and the reranker's score."""

    text: str
    similarity: float
    relevance: float


class Library:
    """Stores passages with their vectors, and calls the three models of the server."""

    def __init__(self, base_url: str, api_key: str, passages: list[str]) -> None:
        self._openai = openai.OpenAI(base_url=base_url, api_key=api_key)
        headers = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=60)
        self._passages = passages
        self._chat, self._embedder, self._reranker = self._models()
        self._vectors = self._embed(passages, None)

    def close(self) -> None:
        """Close the connections to the server."""
        self._openai.close()
        self._http.close()

    def find(self, question: str, num_retrieved: int, num_kept: int) -> list[Found]:
        """Return the most relevant passages. The best passage comes first.

        The `num_retrieved` passages with the highest cosine similarity are reranked, and the best
        `num_kept` of these are returned.
        """
        similarities = self._vectors @ self._embed([question], "query")[0]
        nearest = np.argsort(-similarities)[:num_retrieved]  # the numbers of the passages
        body = {
            "model": self._reranker,
            "query": question,
            "documents": [self._passages[number] for number in nearest],
            "top_n": num_kept,
        }
        reply = self._http.post("/rerank", json=body).raise_for_status().json()
        found = []
        for result in reply["results"]:
            number = nearest[result["index"]]
            similarity = float(similarities[number])
            found.append(Found(self._passages[number], similarity, result["relevance_score"]))
        return found

    def answer(self, question: str, found: list[Found]) -> str:
        """Return the chat model's answer. The system message contains the passages."""
        passages = "\n".join(passage.text for passage in found)
        reply = self._openai.chat.completions.create(
            model=self._chat,
            messages=[
                {"role": "system", "content": f"Answer from these passages:\n{passages}"},
                {"role": "user", "content": question},
            ],
            temperature=0,
            max_tokens=200,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        return reply.choices[0].message.content or ""

    def _models(self) -> list[str]:
        """Return the names of the chat model, the embedding model and the reranker.

        The server lists its models in this order.
        """
        names = [model.id for model in self._openai.models.list()]
        if len(names) != 3:
            raise SystemExit(
                "This example needs a server with a chat model, an embedding model and a reranker, "
                f"but the server lists: {', '.join(names)}"
            )
        return names

    def _embed(self, texts: list[str], prompt_name: str | None) -> npt.NDArray[np.float32]:
        """Return one normalized vector for each text, as a float32 array of shape [n, dim]."""
        extra = {"prompt_name": prompt_name} if prompt_name else {}
        reply = self._openai.embeddings.create(model=self._embedder, input=texts, extra_body=extra)
        return np.array([item.embedding for item in reply.data], dtype=np.float32)


def main() -> None:
    """Print the passages that were found, and the answer."""
    args = parse_arguments()
    try:
        text = args.passages.read_text(encoding="utf-8") if args.passages else PASSAGES
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--passages: {args.passages} cannot be read ({error}). Give a file with UTF-8.")
    library = Library(args.base_url, args.api_key, [line for line in text.splitlines() if line])
    try:
        found = library.find(args.question, args.retrieve, args.keep)
        for passage in found:
            scores = f"[{passage.relevance:.3f}, cosine {passage.similarity:.3f}]"
            print(f"{scores} {passage.text}")  # noqa: T201
        print(library.answer(args.question, found))  # noqa: T201
    finally:
        library.close()


def parse_arguments() -> argparse.Namespace:
    """Return the question and the options from the command line."""
    parser = argparse.ArgumentParser(description="Answer a question from passages.")
    parser.add_argument("question", nargs="?", default="Who keeps a hedgehog?")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    )
    parser.add_argument("--api-key", default=os.environ.get("NEREID_API_KEY", "none"))
    parser.add_argument("--passages", type=Path, help="a text file with one passage per line")
    parser.add_argument("--retrieve", type=int, default=6, help="passages that are reranked")
    parser.add_argument("--keep", type=int, default=2, help="passages that the chat model reads")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (openai.APIConnectionError, httpx.ConnectError) as error:
        sys.exit(f"The server cannot be reached ({error}). Start it, or pass its --base-url.")
    except (openai.APIStatusError, httpx.HTTPStatusError) as error:
        sys.exit(f"The server refused the request: {error}")
