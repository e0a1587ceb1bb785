"""Retrieval-augmented generation with three models of one server: embed, rerank, answer.

    python client/examples/rag.py "Who keeps a hedgehog?"

The passages below are about the demo models' invented world; bring your own with --passages FILE,
one to a line. Needs `openai`, `httpx` and `numpy`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import openai

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
    """A passage and what the two stages thought of it."""

    text: str
    similarity: float
    relevance: float


class Library:
    """Passages with their vectors, and the server that embeds, reranks and answers."""

    def __init__(self, base_url: str, api_key: str, passages: list[str]) -> None:
        self._openai = openai.OpenAI(base_url=base_url, api_key=api_key)
        headers = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=60)
        self._passages = passages
        self._chat, self._embedder, self._reranker = self._models()
        self._vectors = self._embed(passages, None)

    def close(self) -> None:
        """Close the connections."""
        self._openai.close()
        self._http.close()

    def find(self, question: str, num_retrieved: int, num_kept: int) -> list[Found]:
        """The passages that say most about the question: retrieved by vector, then reranked."""
        similarities = self._vectors @ self._embed([question], "query")[0]
        nearest = np.argsort(-similarities)[:num_retrieved]
        body = {
            "model": self._reranker,
            "query": question,
            "documents": [self._passages[at] for at in nearest],
            "top_n": num_kept,
        }
        reply = self._http.post("/rerank", json=body).raise_for_status().json()
        return [
            Found(
                result["document"]["text"],
                float(similarities[nearest[result["index"]]]),
                result["relevance_score"],
            )
            for result in reply["results"]
        ]

    def answer(self, question: str, found: list[Found]) -> str:
        """What the chat model says, with the passages before it."""
        passages = "\n".join(one.text for one in found)
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
        """The server lists the chat model, the embedder and the reranker in this order."""
        names = [model.id for model in self._openai.models.list()]
        if len(names) != 3:
            raise SystemExit(f"rag.py needs a server with three models; it has {', '.join(names)}")
        return names

    def _embed(self, texts: list[str], prompt_name: str | None) -> npt.NDArray[np.float32]:
        """Unit vectors [n, dim]."""
        extra = {"prompt_name": prompt_name} if prompt_name else {}
        reply = self._openai.embeddings.create(model=self._embedder, input=texts, extra_body=extra)
        return np.array([item.embedding for item in reply.data], dtype=np.float32)


def main() -> None:
    """Answer one question and show what the answer rests on."""
    parser = argparse.ArgumentParser(description="Ask the passages a question.")
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:9000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--passages", type=Path, help="a file with one passage to a line")
    parser.add_argument("--retrieve", type=int, default=6, help="passages from the embedder")
    parser.add_argument("--keep", type=int, default=2, help="of these, by the reranker's opinion")
    args = parser.parse_args()
    text = args.passages.read_text(encoding="utf-8") if args.passages else PASSAGES
    library = Library(args.base_url, args.api_key, [line for line in text.splitlines() if line])
    try:
        found = library.find(args.question, args.retrieve, args.keep)
        for one in found:
            print(f"[{one.relevance:.3f}, cosine {one.similarity:.3f}] {one.text}")  # noqa: T201
        print(library.answer(args.question, found))  # noqa: T201
    finally:
        library.close()


if __name__ == "__main__":
    main()
