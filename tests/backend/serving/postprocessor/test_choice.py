import pytest
from nereid_backend.serving.postprocessor.choice import Choice
from nereid_backend.serving.postprocessor.message_builder import ParsedMessage, PlainMessage
from nereid_backend.serving.wire import Ending, SequenceDelta, StreamContext
from nereid_parsers import get_format


def decode(ids):
    return "".join(chr(i) for i in ids)


def ids(text):
    return [ord(c) for c in text]


class Texts:
    """The text of each token in these tests. The id of a token is the code of its character."""

    def text(self, token_id):
        return chr(token_id)

    def data(self, token_id):
        return chr(token_id).encode()


def row(token_id):
    """Return the log-probabilities of a token with the rank 2 and of one alternative."""
    return [[token_id, token_id + 1], [-0.5, -1.5], 2]


def take(answer, token_ids, ending=None, **part):
    """Add the tokens of one step to a choice. Each token has the log-probability -0.5."""
    num_earlier_tokens = getattr(answer, "num_taken_tokens", 0)
    answer.num_taken_tokens = num_earlier_tokens + len(token_ids)
    counts = range(num_earlier_tokens + 1, answer.num_taken_tokens + 1)
    sums = tuple(-0.5 * num_tokens for num_tokens in counts)
    answer.add(SequenceDelta(0, tuple(token_ids), sums, ending=ending, **part))


def usage(completion, reasoning=0, cached=0):
    return {
        "prompt_tokens": 4,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def open_answer(index=0, message=None, check=None, **context):
    context = StreamContext(**{"stream": True, "num_prompt_tokens": 4} | context)
    return Choice(context, index, decode, message or PlainMessage(), Texts(), check)


def test_each_step_of_a_stream_has_an_output_with_usage():
    answer = open_answer()
    take(answer, ids("He"))
    first = answer.take_output()
    take(answer, ids("y"), Ending("length"))
    last = answer.take_output()
    assert (first.text, first.num_output_tokens, first.finish_reason) == ("He", 2, None)
    assert last.delta == {
        "content": "y",
        "cumulative_logprob": -1.5,
        "finish_reason": "length",
        "usage": usage(3),
    }


def test_without_streaming_there_is_exactly_one_output():
    answer = open_answer(stream=False)
    take(answer, ids("He"))
    assert answer.take_output() is None
    take(answer, ids("y"), Ending("length"))
    assert answer.take_output().text == "Hey"


def test_a_heartbeat_has_no_output():
    answer = open_answer()
    take(answer, [])
    assert answer.take_output() is None


def test_the_stop_token_is_counted_but_has_no_text():
    answer = open_answer()
    take(answer, [*ids("Hi"), 7], Ending("stop", 7))
    piece = answer.take_output()
    assert piece.text == "Hi"
    assert piece.delta["usage"]["completion_tokens"] == 3
    assert piece.delta["stop_reason"] == 7


def test_tokens_of_later_steps_have_no_effect_after_a_stop_string():
    answer = open_answer(stop=("ND",))
    take(answer, ids("xEN"))
    assert answer.take_output().text == "xE"
    take(answer, ids("D"))
    assert answer.stop_string == "ND"

    take(answer, ids("more"))
    take(answer, ids("and"), Ending("abort"))
    piece = answer.take_output()
    assert piece.text == ""
    assert piece.delta == {
        "cumulative_logprob": -2.0,
        "finish_reason": "stop",
        "stop_reason": "ND",
        "usage": usage(4),
    }


def test_the_possible_beginning_of_a_stop_string_is_sent_at_the_end():
    answer = open_answer(stop=("END",))
    take(answer, ids("xEN"), Ending("length"))
    assert answer.take_output().text == "xEN"


def test_the_prompt_is_repeated_in_the_text_but_not_in_the_delta():
    answer = open_answer(prepend="Q: ", stream=False)
    take(answer, ids("A"), Ending("length"))
    piece = answer.take_output()
    assert piece.text == "Q: A"
    assert piece.delta["content"] == "A"


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


QWEN = get_format(reasoning="qwen3", tools="hermes")
START = "<|im_start|>assistant\n"
THOUGHT = "<think>\nsum it\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def parsed_answer(prompt=START, check=None, **fields):
    fields = {"stream": True, "num_prompt_tokens": 4, "prompt": prompt, "tools": TOOLS} | fields
    context = StreamContext(**fields)
    return open_answer(message=ParsedMessage(QWEN, context), check=check, **fields)


def read(answer, text, size=3, ending=None):
    """Add a text to a choice in steps of `size` tokens.

    Returns:
        The joined texts and tool calls of all outputs, and the last output.
    """
    total = {"reasoning": "", "content": "", "arguments": "", "names": [], "text": ""}
    for start in range(0, len(text), size):
        is_last = start + size >= len(text)
        step_ending = (ending or Ending("stop", 7)) if is_last else None
        take(answer, ids(text[start : start + size]), step_ending)
        piece = answer.take_output()
        if piece is None:
            continue
        total["text"] += piece.text
        for part in ("reasoning", "content"):
            total[part] += piece.delta.get(part, "")
        for call in piece.delta.get("tool_calls", []):
            total["arguments"] += call["arguments"]
            total["names"] += [call["name"]] if "name" in call else []
    return total, piece


def test_reasoning_content_and_calls_are_parts_of_the_delta():
    text = THOUGHT + "Let me see." + CALL
    total, last = read(parsed_answer(), text)
    assert total["reasoning"].strip() == "sum it"
    assert total["content"].strip() == "Let me see."
    assert (total["names"], total["arguments"]) == (["add"], '{"a": 1}')
    assert total["text"] == text
    assert last.finish_reason == "tool_calls"


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_reasoning_tokens_are_those_up_to_the_end_of_the_closing_marker(size):
    reasoning, content = "hm\n</think>", "\n\nYes, of course."
    _, last = read(parsed_answer(START + "<think>\n"), reasoning + content, size)
    num_tokens = len(reasoning + content)  # Each character is one token.
    assert last.delta["usage"] == usage(num_tokens, reasoning=len(reasoning))


def test_an_answer_without_reasoning_has_no_reasoning_tokens():
    _, last = read(parsed_answer(), "Just so.")
    assert last.delta["usage"] == usage(8)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("prompt", [START, START + "<think>\n"])
def test_reasoning_that_is_not_separated_is_content_as_the_model_wrote_it(prompt, size):
    text = ("" if prompt.endswith("<think>\n") else "<think>\n") + "hm\n</think>\n\nYes."
    total, _ = read(parsed_answer(prompt, separate_reasoning=False), text, size)
    assert (total["content"], total["reasoning"]) == (text, "")


def test_excluded_reasoning_is_left_out_but_counted():
    total, last = read(parsed_answer(include_reasoning=False), THOUGHT + "Yes.")
    assert (total["content"].strip(), total["reasoning"]) == ("Yes.", "")
    assert last.delta["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("size", [1, 1000])
def test_with_tool_choice_none_a_call_stays_in_the_content(size):
    total, last = read(parsed_answer(reads_calls=False), THOUGHT + CALL, size)
    assert total["content"].strip() == CALL
    assert (total["names"], last.finish_reason) == ([], "stop")


def test_log_probabilities_are_sent_even_if_the_text_is_held_back():
    answer = open_answer(stop=("END",))
    take(answer, ids("E"), logprobs=(row(ord("E")),))
    piece = answer.take_output()
    assert piece.text == ""
    assert piece.delta["logprobs"] == [
        {
            "token": "E",
            "token_id": 69,
            "logprob": -0.5,
            "bytes": [69],
            "rank": 2,
            "top_logprobs": [{"token": "F", "token_id": 70, "logprob": -1.5, "bytes": [70]}],
        }
    ]


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped():
    answer = open_answer(stop=("ND",), prompt_token_ids=(1, 2))
    token_ids = ids("xENDmore")
    take(answer, token_ids, logprobs=tuple(map(row, token_ids)))
    delta = answer.take_output().delta
    assert delta["content"] == "xE"
    assert delta["token_ids"] == ids("xEND")
    assert [entry["token"] for entry in delta["logprobs"]] == list("xEND")
    take(answer, [], Ending("abort"))
    last = answer.take_output()
    assert (last.delta["cumulative_logprob"], last.delta["usage"]) == (-2.0, usage(4))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_before_min_tokens_is_text(size):
    answer = open_answer(stop=("END",), min_tokens=5)
    text = "aEND bEND c"
    for start in range(0, len(text), size):
        take(answer, ids(text[start : start + size]))
    assert answer.take_output().text == "aEND b"
    assert answer.stop_string == "END"


def test_only_the_first_delta_of_the_first_choice_has_the_fields_of_the_prompt():
    prompt = {"prompt_logprobs": (None, row(66)), "num_cached_tokens": 3}
    first, second = (open_answer(index, prompt_token_ids=(65, 66)) for index in (0, 1))
    take(first, ids("a"), **prompt)
    take(second, ids("b"))
    delta = first.take_output().delta
    assert delta["prompt_token_ids"] == [65, 66]
    assert delta["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -0.5, "rank": 2, "decoded_token": "B"},
            "67": {"logprob": -1.5, "rank": 1, "decoded_token": "C"},
        },
    ]
    assert delta["usage"] == usage(1, cached=3)

    take(first, ids("c"))
    assert not {"prompt_token_ids", "prompt_logprobs"} & first.take_output().delta.keys()
    assert second.take_output().delta == {
        "index": 1,
        "content": "b",
        "token_ids": [98],
        "usage": usage(1),
    }


def test_a_message_that_the_model_ended_is_validated_as_a_whole():
    checked_messages = []
    read(parsed_answer(check=checked_messages.append), THOUGHT + CALL)
    (message,) = checked_messages
    assert message["content"].strip() == ""
    assert message["calls"] == [{"name": "add", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("ending", [Ending("length"), Ending("abort")])
def test_a_truncated_message_is_not_validated(ending):
    checked = []
    read(open_answer(check=checked.append), '{"a"', ending=ending)
    assert checked == []
