r"""Decode the input of a custom tool from the arguments of a function call.

The model calls a custom tool as a function with the parameter `input`. The arguments of the call
arrive in pieces of JSON text. Example: the pieces `{"input": "a\` and `nb"}` contain the input "a",
a line break and "b".
"""

import json
import re

_OPENING_TOKENS = ("{", '"input"', ":", '"')
"""The tokens before the input, in the arguments of the call. White space may precede each token."""
_OPENING = re.compile("".join(r"[ \t\r\n]*" + re.escape(token) for token in _OPENING_TOKENS))
_CLOSING = re.compile(r'"[ \t\r\n]*(?:\}[ \t\r\n]*)?\Z')
"""The text after the input, or the beginning of this text."""
_WHITE_SPACE = " \t\r\n"

_PLAIN_TEXT = re.compile(r'[^"\\]+')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]')
"""An escape of JSON. The two escapes of a surrogate pair are one match."""
_INCOMPLETE_ESCAPE = re.compile(
    rf"(?:\\(?:u[0-9a-fA-F]{{0,3}})?|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)\Z"
)
r"""The beginning of an escape at the end of a text, such as `\u00`, or `\ud83d\u` of a pair."""


class InputDecoder:
    r"""Decodes the input of one call while the arguments arrive.

    Each piece of text is returned as soon as its meaning cannot change. If the arguments are not an
    object that begins with the string `input`, the input consists of the whole arguments. If the
    string contains escapes that JSON does not define, or quotation marks without a backslash, the
    input contains them unchanged. No text of the model is lost.

    Examples of arguments and inputs:

        {"input": "a\u00e9"}      aé
        {"input": "say "hi""}     say "hi"
        {"input": "a\d"}          a\d
        {"text": "a"}             {"text": "a"}
        {"input": "cut o          cut o
    """

    def __init__(self) -> None:
        self._unread = ""  # the arguments whose meaning is not certain
        self._is_open = False  # whether the tokens `{"input": "` before the input have been read
        # True if the arguments do not begin with the tokens `{"input": "`. All of the arguments are
        # then the input.
        self._is_raw = False

    def add(self, arguments: str) -> str:
        """Decode the next piece of a call's arguments, and return the new text of the tool's input.

        Example: the pieces `{"inp`, `ut": "a` and `b"}` return "", "a" and "b".
        """
        self._unread += arguments
        if not self._is_open and not self._is_raw:
            self._read_opening()
        if self._is_raw:
            return self._pop_unread()
        return self._read_string() if self._is_open else ""

    def finish(self) -> str:
        """Return the rest of the input. Call this method after the last piece of the arguments.

        The rest is empty, unless the arguments end before the input begins or within an escape.
        """
        return "" if self._can_be_end_of_arguments(0) else self._pop_unread()

    def _read_opening(self) -> None:
        """Read the opening `{"input": "` of the arguments as soon as all of it has arrived.

        Mutates: `_is_open` becomes True after the opening, which is then removed from `_unread`.
            `_is_raw` becomes True if the arguments have no opening. Otherwise, nothing changes.
        """
        opening = _OPENING.match(self._unread)
        if opening is not None:
            self._is_open = True
            self._unread = self._unread[opening.end() :]
        elif not _is_start_of_opening(self._unread):
            self._is_raw = True

    def _read_string(self) -> str:
        r"""Return the decoded string, up to the first part whose meaning depends on later text.

        Such a part is an incomplete escape such as `\u00`, or a quotation mark that may end the
        arguments.

        Example: the unread text `the word \"no\"\u00` returns `the word "no"`. The rest `\u00`
        stays unread.
        """
        decoded: list[str] = []
        text, at = self._unread, 0  # `at` is the index of the next character in the unread text
        while at < len(text):
            if _INCOMPLETE_ESCAPE.match(text, at) or self._can_be_end_of_arguments(at):
                break
            if plain := _PLAIN_TEXT.match(text, at):
                part = meaning = plain[0]
            elif escape := _ESCAPE.match(text, at):
                part = escape[0]
                meaning = _decoded(part)
            else:  # A quotation mark or a backslash without a meaning in JSON stays unchanged.
                part = meaning = text[at]
            decoded.append(meaning)
            at += len(part)
        self._unread = text[at:]
        return "".join(decoded)

    def _can_be_end_of_arguments(self, at: int) -> bool:
        """Return whether the arguments can end with the text `_unread[at:]`.

        Examples: `"`, `"}` and `"` followed by a line break can be the end, but `", "a": 1}` and an
        empty text cannot.
        """
        return self._is_open and _CLOSING.match(self._unread, at) is not None

    def _pop_unread(self) -> str:
        """Return the text of the arguments that has not been decoded yet, and clear `_unread`."""
        unread, self._unread = self._unread, ""
        return unread


def decode_input(arguments: str) -> str:
    """Return the input of a custom tool from the whole arguments of a call.

    Example: `{"input": "ls -l"}` returns "ls -l".
    """
    decoder = InputDecoder()
    return decoder.add(arguments) + decoder.finish()


def _is_start_of_opening(text: str) -> bool:
    """Return whether `text` can be the beginning of the opening `{"input": "`.

    In the arguments of a custom tool's call, the opening precedes the input. White space may
    precede each token of the opening.

    Examples: the result for `{ "in` and for an empty text is True. The result for `{"x` is False.
    """
    rest = text
    for token in _OPENING_TOKENS:
        rest = rest.lstrip(_WHITE_SPACE)
        is_cut_off = len(rest) < len(token)
        if is_cut_off:
            return token.startswith(rest)
        if not rest.startswith(token):
            return False
        rest = rest.removeprefix(token)
    return True  # `text` contains the whole opening


def _decoded(escape: str) -> str:
    r"""Decode an escape sequence. Half of a surrogate pair is returned unchanged.

    Examples: `\n` returns a line break, and `\ud83d` returns `\ud83d`.
    """
    text: str = json.loads(f'"{escape}"')
    return escape if "\ud800" <= text <= "\udfff" else text
