"""Chat through the OpenAI API with the `openai` package, streaming.

python client/examples/chat_openai.py "What is 12 + 30?"
"""

import argparse
import os
import sys

from openai import OpenAI


def main() -> None:
    """Ask once and print the answer as it comes; reasoning goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Hello! Who are you?")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    )
    parser.add_argument("--model", help="default: the first one that is served")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("NEREID_API_KEY", "none"))
    model = args.model or client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt}],
        max_completion_tokens=args.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            # Not in OpenAI's types: reasoning is an addition of open servers.
            sys.stderr.write(getattr(choice.delta, "reasoning", None) or "")
            sys.stdout.write(choice.delta.content or "")
            sys.stdout.flush()
    sys.stdout.write("\n")
    if usage is not None:
        sys.stderr.write(f"[{usage.prompt_tokens} + {usage.completion_tokens} tokens]\n")


if __name__ == "__main__":
    main()
