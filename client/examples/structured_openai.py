"""Several answers that obey a JSON schema, best first, with the `openai` package.

python client/examples/structured_openai.py "Invent a person." --n 3
"""

import argparse
import math
import os
import sys

from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """What every answer is."""

    name: str
    age: int


def main() -> None:
    """Ask once for `n` answers; print each with the mean probability of its tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Invent a person: name and age.")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    )
    parser.add_argument("--model", help="default: the first one that is served")
    parser.add_argument("--n", type=int, default=3)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("NEREID_API_KEY", "none"))
    answer = client.chat.completions.parse(
        model=args.model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.prompt}],
        response_format=Person,
        n=args.n,
        logprobs=True,
        max_completion_tokens=256,
    )
    rated = []
    for choice in answer.choices:
        tokens = (choice.logprobs and choice.logprobs.content) or []
        mean = sum(token.logprob for token in tokens) / max(1, len(tokens))
        rated.append((math.exp(mean), choice.message.parsed))
    for probability, person in sorted(rated, key=lambda pair: pair[0], reverse=True):
        sys.stdout.write(f"{probability:.0%}  {person}\n")


if __name__ == "__main__":
    main()
