from hypothesis import given, settings
from hypothesis import strategies as st
from nereid_backend.text.stop_strings import StopStrings


def run(text, stops, sizes=(1,), *, include=False):
    """Feed `text` in pieces of these sizes. Return the output and the found stop string."""
    matcher, out, at, turn = StopStrings(stops, include_in_output=include), "", 0, 0
    while at < len(text):
        match = matcher.feed(text[at : at + sizes[turn % len(sizes)]])
        out += match.text
        if match.stop is not None:
            return out, match.stop
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    return out + matcher.finish(), None


def test_text_ends_before_the_stop_string():
    assert run("one two END three", ["END"]) == ("one two ", "END")


def test_the_stop_string_is_returned_on_request():
    assert run("one END two", ["END"], include=True) == ("one END", "END")


def test_a_stop_string_in_several_pieces_is_found_and_not_returned():
    matcher = StopStrings(["</s>"])
    assert [matcher.feed(c).text for c in "ab</"] == ["a", "b", "", ""]
    assert matcher.feed("s>").stop == "</s>"


def test_an_incomplete_stop_string_is_returned():
    assert run("a </b> c", ["</s>"]) == ("a </b> c", None)
    assert run("ends with </", ["</s>"]) == ("ends with </", None)


def test_the_stop_string_that_is_complete_first_ends_the_text_or_the_longest_of_several():
    assert run("xabcd", ["cd", "bc"], (5,)) == ("xa", "bc")
    assert run("xabc", ["bc", "abc"], (4,)) == ("x", "abc")


def test_without_stop_strings_text_is_returned_at_once():
    assert StopStrings([]).feed("anything").text == "anything"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab<", max_size=30),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_the_output_does_not_depend_on_the_pieces(text, stops, sizes):
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    out, found = run(text, stops, sizes)
    assert (found is not None) == bool(ends)
    assert text.startswith(out)
    if found is None:
        assert out == text
    assert run(text, stops, (1,)) == (out, found)
