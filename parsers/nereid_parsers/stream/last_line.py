"""Decides whether the content only mentions a tag, as in `Write <think>`."""

from __future__ import annotations

import re

_CODE_FENCE = "```"
# Matches the last character of a word or sentence, such as `.` in `Done.<think>`. A tag that
# directly follows this character is not a word of the text. The regex does not match a Chinese
# character: Chinese text has no white space between words, so a tag that is only mentioned may
# directly follow such a character.
_find_end_of_words = re.compile(r"[A-Za-z0-9.!?…。！？]\Z").search
# Only the first characters and the last character of a line are stored.
_MAX_STORED_CHARS = 20
_NUM_FIRST_CHARS = 10


class LastLine:
    """The last line of the content, which shows whether the next tag is only mentioned."""

    __slots__ = ("_is_in_code_block", "_text")

    def __init__(self) -> None:
        """Create the empty line at the start of the content."""
        self._text = ""
        self._is_in_code_block = False

    def add(self, text: str) -> None:
        """Add the next piece of the content."""
        *finished_lines, last_line = (self._text + text).split("\n")
        for line in finished_lines:
            self._is_in_code_block = self._is_in_code_block_after(line)
        if len(last_line) > _MAX_STORED_CHARS:
            last_line = last_line[:_NUM_FIRST_CHARS] + last_line[-1]
        self._text = last_line

    def mentions_next_tag(self, whitespace: str) -> bool:
        r"""Return whether the content only mentions the next tag. Such a tag is no markup.

        `whitespace` is the white space between this line and the tag.
        Examples, in the order of the code:

            content and tag               result
            any text in a code block      True
            `Hi.\n\n<think>`              False, because the tag starts a line
            `Write <think>`               True, because the tag looks like a word of the sentence
            `Hi.<think>`, `Hi<think>`     False
            `(<think>`                    True
        """
        if self._is_tag_in_code_block(whitespace):
            return True
        if "\n" in whitespace:
            return False
        if whitespace:
            return True
        follows_word_or_sentence = _find_end_of_words(self._text) is not None
        return not follows_word_or_sentence

    def _is_tag_in_code_block(self, whitespace: str) -> bool:
        """Return whether the next tag is in a code block. `whitespace` precedes the tag."""
        has_line_ended = "\n" in whitespace
        if has_line_ended:  # This line may open or close a code block.
            return self._is_in_code_block_after(self._text)
        return self._is_in_code_block

    def _is_in_code_block_after(self, line: str) -> bool:
        """Return whether the text after `line` is in a code block. `line` is the next full line."""
        return self._is_in_code_block != _is_code_fence(line)


def _is_code_fence(line: str) -> bool:
    """Return whether a line opens or closes a code block in Markdown."""
    return line.lstrip().startswith(_CODE_FENCE)
