"""Let the model call a tool: run the tool calls, send the results back, and print the answer.

.venv/bin/python client/examples/tools_openai.py "What is the weather in Paris?"

The example needs the package `openai`, which the environment `.venv` of this repository has.
"""

import argparse
import json
import os
import sys
from typing import Any

try:
    import openai
except ImportError as error:
    sys.exit(f"{error}. Run this example with .venv/bin/python, or: pip install openai")

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The name of the city."},
                },
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> dict[str, Any]:
    """Return the weather in a city. A real program would ask a weather service here."""
    return {"city": city, "temperature": 21, "condition": "sunny"}


def main() -> None:
    """Send the question, run every requested call, and repeat until the model answers."""
    args = parse_arguments()
    client = openai.OpenAI(base_url=args.base_url, api_key=os.environ.get("NEREID_API_KEY", "none"))
    model = args.model or client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": args.prompt}]
    for _ in range(args.max_rounds):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            temperature=0,
            max_completion_tokens=512,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        choice = completion.choices[0]
        if choice.finish_reason == "length":
            sys.exit("The answer was cut off at max_completion_tokens; raise that limit.")
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            print(choice.message.content)  # noqa: T201
            return
        messages += [tool_message(call) for call in choice.message.tool_calls]
    sys.exit(f"The model still called tools after {args.max_rounds} requests.")


def tool_message(call: Any) -> dict[str, str]:  # noqa: ANN401 - a type of the openai package
    """Run a tool call, print the call and its result, and return the message with the result."""
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"{call.function.name}({arguments}) -> {result}")  # noqa: T201
    return {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}


def parse_arguments() -> argparse.Namespace:
    """Return the question and the options from the command line."""
    parser = argparse.ArgumentParser(description="Answer a question with the help of a tool.")
    parser.add_argument("prompt", nargs="?", default="What is the weather in Paris?")
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    )
    parser.add_argument("--model", help="default: the first model that the server lists")
    parser.add_argument("--max-rounds", type=int, default=4, help="limit of requests")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"The server cannot be reached ({error}). Start it, or pass its --base-url.")
    except openai.APIStatusError as error:
        sys.exit(f"The server refused the request: {error.message}")
