"""Chat over the OpenAI API with the `openai` package, and print the answer while it is written.

.venv/bin/python client/examples/chat_openai.py "What is 12 + 30?"

The example needs the package `openai`, which the environment `.venv` of this repository has.
"""

import argparse
import os
import sys

try:
    import openai
except ImportError as error:
    sys.exit(f"{error}. Run this example with .venv/bin/python, or: pip install openai")


def main() -> None:
    """Send one message, and print the answer to stdout and the reasoning to stderr."""
    args = parse_arguments()
    client = openai.OpenAI(base_url=args.base_url, api_key=os.environ.get("NEREID_API_KEY", "none"))
    model = args.model or client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt}],
        max_completion_tokens=args.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    finish_reason = None
    is_reasoning = False
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            # OpenAI's types do not contain the field `reasoning`; open-source servers added it.
            reasoning = getattr(choice.delta, "reasoning", None) or ""
            if is_reasoning and not reasoning:
                sys.stderr.write("\n")
            is_reasoning = bool(reasoning)
            sys.stderr.write(reasoning)
            sys.stdout.write(choice.delta.content or "")
            sys.stdout.flush()
    sys.stdout.write("\n")
    if usage is not None:
        sys.stderr.write(f"[{usage.prompt_tokens} + {usage.completion_tokens} tokens]\n")
    if finish_reason == "length":
        sys.stderr.write(f"The answer was cut off at {args.max_tokens} tokens; use --max-tokens.\n")


def parse_arguments() -> argparse.Namespace:
    """Return the message and the options from the command line."""
    parser = argparse.ArgumentParser(description="Send one message and stream the answer.")
    parser.add_argument("prompt", nargs="?", default="Hello! Who are you?")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    )
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="limit of reasoning and answer together"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"The server cannot be reached ({error}). Start it, or pass its --base-url.")
    except openai.APIStatusError as error:
        sys.exit(f"The server refused the request: {error.message}")
