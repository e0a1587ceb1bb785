"""The objects that all readers of one message share."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.policy import Policy, TextRule
from nereid_parsers.stream.compiled.compiled_format import CompiledFormat
from nereid_parsers.stream.text_buffer import TextBuffer
from nereid_parsers.stream.text_writer import TextWriter


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """The objects that all readers of one message share.

    Attributes:
        format: The compiled format.
        policy: The rules for cases that the format does not define.
        buffer: The buffer that contains the text.
        text: The writer of reasoning and content.
    """

    format: CompiledFormat
    policy: Policy
    buffer: TextBuffer
    text: TextWriter

    @property
    def calls_must_come_first(self) -> bool:
        """Whether a tool call is recognised only before the content (`TextRule.CALLS_FIRST`)."""
        return self.policy.text is TextRule.CALLS_FIRST
