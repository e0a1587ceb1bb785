from nereid_backend.serving.answer import Answer
from nereid_backend.serving.message import ParsedMessage, PlainMessage
from nereid_backend.serving.wire import Ending, StepState, StreamContext
from nereid_parsers import get_format


def decode(ids):
    return "".join(chr(i) for i in ids)


def ids(text):
    return [ord(c) for c in text]


def state(ending=None, logprob=0.0):
    return StepState(0, 1, 1, logprob, None, ending)


def open_answer(**context):
    return Answer(
        StreamContext(**{"stream": True, "num_prompt_tokens": 4} | context),
        1,
        decode,
        PlainMessage(),
    )


def test_a_stream_gives_a_piece_a_step_and_usage_in_each():
    answer = open_answer()
    answer.take(ids("He"), state())
    first = answer.piece()
    answer.take(ids("y"), state(Ending("length"), -2.0))
    last = answer.piece()
    assert (first.text, first.num_output_tokens, first.finish_reason) == ("He", 2, None)
    assert last.delta == {
        "content": "y",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
    }
    assert last.cumulative_logprob == -2.0


def test_without_streaming_there_is_exactly_one_piece():
    answer = open_answer(stream=False)
    answer.take(ids("He"), state())
    assert answer.piece() is None
    answer.take(ids("y"), state(Ending("length")))
    assert answer.piece().text == "Hey"


def test_a_heartbeat_says_nothing():
    answer = open_answer()
    answer.take([], state())
    assert answer.piece() is None


def test_the_stop_token_is_counted_but_not_shown():
    answer = open_answer()
    answer.take([*ids("Hi"), 7], state(Ending("stop", 7)))
    piece = answer.piece()
    assert piece.text == "Hi"
    assert piece.delta["usage"]["completion_tokens"] == 3
    assert piece.delta["stop_reason"] == 7


def test_behind_a_stop_string_nothing_more_is_shown_or_counted():
    answer = open_answer(stop=("ND",))
    answer.take(ids("xEN"), state())
    assert answer.piece().text == "xE"
    answer.take(ids("D"), state())
    assert answer.stop_string == "ND"
    answer.take(ids("more"), state())
    answer.take(ids("and"), state(Ending("abort")))
    piece = answer.piece()
    assert piece.text == ""
    assert piece.delta == {
        "finish_reason": "stop",
        "stop_reason": "ND",
        "usage": {"prompt_tokens": 4, "completion_tokens": 4},
    }


def test_what_was_held_as_a_possible_stop_comes_at_the_end():
    answer = open_answer(stop=("END",))
    answer.take(ids("xEN"), state(Ending("length")))
    assert answer.piece().text == "xEN"


def test_the_prompt_is_repeated_in_the_text_but_not_in_the_delta():
    answer = open_answer(prepend="Q: ", stream=False)
    answer.take(ids("A"), state(Ending("length")))
    piece = answer.piece()
    assert piece.text == "Q: A"
    assert piece.delta["content"] == "A"


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


def parsed_answer(prompt="<|im_start|>assistant\n"):
    context = StreamContext(stream=True, num_prompt_tokens=4, prompt=prompt, tools=TOOLS)
    fmt = get_format(reasoning="qwen3", tools="hermes")
    return Answer(context, 1, decode, ParsedMessage(fmt, TOOLS, prompt))


def test_reasoning_content_and_calls_are_parts_of_the_delta():
    answer = parsed_answer()
    text = (
        "<think>\nsum it\n</think>\n\nLet me see."
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    total = {"reasoning": "", "content": "", "arguments": "", "names": [], "text": ""}
    for at in range(0, len(text), 3):
        last = at + 3 >= len(text)
        answer.take(ids(text[at : at + 3]), state(Ending("stop", 7) if last else None))
        piece = answer.piece()
        total["text"] += piece.text
        for part in ("reasoning", "content"):
            total[part] += piece.delta.get(part, "")
        for call in piece.delta.get("tool_calls", []):
            total["arguments"] += call["arguments"]
            total["names"] += [call["name"]] if "name" in call else []
    assert total["reasoning"].strip() == "sum it"
    assert total["content"].strip() == "Let me see."
    assert (total["names"], total["arguments"]) == (["add"], '{"a": 1}')
    assert total["text"] == text
    assert piece.finish_reason == "tool_calls"
