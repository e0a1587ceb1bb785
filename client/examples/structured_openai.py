"""Ask for several answers that match a JSON schema, and print the most probable answer first.

.venv/bin/python client/examples/structured_openai.py "Invent a person." --n 3

The example needs the packages `openai` and `pydantic`, which the environment `.venv` of this
repository has.
"""

import argparse
import math
import os
import sys
from typing import Any

try:
    import openai
    from pydantic import BaseModel, Field
except ImportError as error:
    sys.exit(f"{error}. Run this example with .venv/bin/python, or: pip install openai pydantic")


class Person(BaseModel):
    """The object that every answer contains. The bounds become part of the JSON schema."""

    name: str = Field(min_length=1, max_length=40)
    age: int = Field(ge=0, le=120)


def main() -> None:
    """Request `n` answers, and print each answer with the mean probability of its tokens."""
    args = parse_arguments()
    client = openai.OpenAI(base_url=args.base_url, api_key=os.environ.get("NEREID_API_KEY", "none"))
    try:
        completion = client.chat.completions.parse(
            model=args.model or client.models.list().data[0].id,
            messages=[{"role": "user", "content": args.prompt}],
            response_format=Person,
            n=args.n,
            temperature=1,  # with 0, the demo model's default, all answers would be equal
            logprobs=True,
            max_completion_tokens=args.max_tokens,
            # Reasoning is not constrained by the schema, and its tokens count towards max_tokens.
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    except openai.LengthFinishReasonError:
        sys.exit(
            f"An answer was cut off after {args.max_tokens} tokens (finish_reason is length), so "
            "it is not complete JSON. Raise --max-tokens."
        )
    for choice in sorted(completion.choices, key=mean_probability, reverse=True):
        probability = mean_probability(choice)
        sys.stdout.write(f"mean token probability {probability:.0%}: {choice.message.parsed}\n")


def mean_probability(choice: Any) -> float:  # noqa: ANN401 - a type of the openai package
    """Return the geometric mean of the probabilities of an answer's tokens."""
    tokens = choice.logprobs.content if choice.logprobs else None
    if not tokens:
        return 1.0
    return math.exp(sum(token.logprob for token in tokens) / len(tokens))


def parse_arguments() -> argparse.Namespace:
    """Return the message and the options from the command line."""
    parser = argparse.ArgumentParser(description="Ask for answers that match a JSON schema.")
    parser.add_argument("prompt", nargs="?", default="Invent a person.")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    )
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--n", type=int, default=3, help="number of answers")
    parser.add_argument("--max-tokens", type=int, default=256, help="limit for each answer")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"The server cannot be reached ({error}). Start it, or pass its --base-url.")
    except openai.APIStatusError as error:
        sys.exit(f"The server refused the request: {error.message}")
