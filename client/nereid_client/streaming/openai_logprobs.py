"""Convert the log-probabilities in deltas to the formats of chat and text completions."""

import codecs
from collections.abc import Iterable, Mapping, Sequence

from nereid_client.streaming.completion_frame import Json
from nereid_client.streaming.deltas import (
    Delta,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

# The log-probability of an impossible token is -infinity, which JSON cannot represent. OpenAI and
# vLLM return -9999 instead.
_MIN_LOGPROB = -9999.0
# The text of a token may start up to this many characters after its expected position. One
# character of up to 4 bytes can consist of several tokens, each of which is an incomplete character
# on its own.
_SEARCH_CHARS = 4
# The estimated number of bytes of the JSON text for one token of the output. The text contains the
# 20 most likely tokens at this position.
_BYTES_PER_POSITION = 1024


def json_bytes_of_logprobs(totals: Iterable[Delta]) -> int:
    """Estimate the number of bytes of the JSON text for all log-probabilities in a response.

    Args:
        totals: for each choice, the sum of the deltas of this choice.
    """
    num_positions = sum(
        len(total.get("logprobs", ())) + len(total.get("prompt_logprobs", ())) for total in totals
    )
    return _BYTES_PER_POSITION * num_positions


def chat_logprobs(entries: Iterable[TokenLogprob], *, tokens_as_ids: bool = False) -> Json:
    """Return `choices[].logprobs` of a chat completion or of one of its chunks.

    Args:
        entries: the log-probabilities of the generated tokens.
        tokens_as_ids: whether a token is named by its id, such as "token_id:17".
    """
    content = []
    for entry in entries:
        chat_entry = _chat_entry(entry, tokens_as_ids=tokens_as_ids)
        chat_entry["top_logprobs"] = [
            _chat_entry(top, tokens_as_ids=tokens_as_ids) for top in entry["top_logprobs"]
        ]
        content.append(chat_entry)
    return {"content": content, "refusal": None}


def prompt_logprobs(logprobs: PromptLogprobs) -> list[Json | None]:
    """Return the field `prompt_logprobs` in vLLM's format. Replace -infinity by -9999."""
    return [
        None
        if entries is None
        else {
            token_id: {**entry, "logprob": _finite(entry["logprob"])}
            for token_id, entry in entries.items()
        }
        for entries in logprobs
    ]


class CompletionLogprobs:
    """Builds the field `logprobs` for one choice of a text completion, delta by delta.

    The field `text_offset` has the position of each token in the text of the choice, in
    characters. Some tokens are not in the text: the end token, hidden special tokens, and tokens
    that a stop string cut off. The position of such a token is the position of the next token.

    Example: the text "ab cd" of the tokens "ab" and " cd" returns {"tokens": ["ab", " cd"],
    "token_logprobs": [-0.1, -0.2], "top_logprobs": [{"ab": -0.1}, {" cd": -0.2}],
    "text_offset": [0, 2]}.

    Args:
        tokens_as_ids: whether a token is named by its id, such as "token_id:17".
        echoed_prompt: the text of the prompt if the choice starts with the prompt, and else "".
    """

    def __init__(self, *, tokens_as_ids: bool = False, echoed_prompt: str = "") -> None:
        self._tokens_as_ids = tokens_as_ids
        self._echoed_prompt = echoed_prompt
        self._text = _LocatedText(echoed_prompt)  # the text of the choice
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add_prompt(self, token_ids: Sequence[int], logprobs: PromptLogprobs) -> Json:
        """Return the part of the field `logprobs` that describes the echoed prompt.

        Call this method before `add`, because the text of the choice starts with the prompt.

        Example: the prompt "a cat" of the tokens 5 and 7, with the log-probabilities [None,
        {"7": {"decoded_token": " cat", "logprob": -0.1, ...}}], returns {"tokens": ["a", " cat"],
        "token_logprobs": [None, -0.1], "top_logprobs": [None, {" cat": -0.1}],
        "text_offset": [0, 1]}.

        Args:
            token_ids: the token ids of the prompt.
            logprobs: for each token, its log-probability and those of the most likely tokens. The
                first token has None, because no token comes before it.
        """
        texts = _prompt_token_texts(self._echoed_prompt, token_ids, logprobs)
        part: Json = {
            "tokens": [
                self._token_name(text, token_id)
                for text, token_id in zip(texts, token_ids, strict=True)
            ],
            "token_logprobs": [
                None if entries is None else _finite(entries[str(token_id)]["logprob"])
                for token_id, entries in zip(token_ids, logprobs, strict=True)
            ],
            "top_logprobs": [self._likely_prompt_tokens(entries) for entries in logprobs],
            "text_offset": [self._text.locate(text, is_text_complete=True) for text in texts],
        }
        # The text of the first delta starts directly after the prompt. The search for the next
        # token therefore starts there, even if the last token of the prompt was not found.
        self._text.next_position = len(self._echoed_prompt)
        return part

    def _likely_prompt_tokens(
        self, entries: Mapping[str, PromptLogprob] | None
    ) -> dict[str, float] | None:
        """Return the log-probability of each token that is reported for one position of the prompt.

        Example: {"17": {"decoded_token": "ab", "logprob": -0.1, ...}} returns {"ab": -0.1}. None,
        for the first token, returns None.
        """
        if entries is None:
            return None
        likely_tokens = {}
        for token_id, entry in entries.items():
            name = self._token_name(entry["decoded_token"] or "", int(token_id))
            likely_tokens[name] = _finite(entry["logprob"])
        return likely_tokens

    def add(self, text: str, entries: Iterable[TokenLogprob], *, is_last: bool) -> Json:
        """Return the part of the field `logprobs` that describes one delta.

        Args:
            text: the text of the delta. It may end before the text of the last tokens, which then
                arrives with a later delta.
            entries: the log-probabilities of the delta's tokens.
            is_last: whether this is the last delta of the choice, so that no text is still to come.
        """
        self._text.append(text)
        part = _empty()
        for entry in entries:
            self._skip_incomplete_character(entry, is_text_complete=is_last)
            position = self._text.locate(self._decode(entry), is_text_complete=is_last)
            part["text_offset"].append(position)
            part["tokens"].append(self._token_name(entry["token"], entry["token_id"]))
            part["token_logprobs"].append(_finite(entry["logprob"]))
            part["top_logprobs"].append(self._likely_tokens(entry))
        return part

    def _likely_tokens(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of a generated token and of the most likely tokens.

        Example: the token "ab" and the most likely token "cd" return {"ab": -1.2, "cd": -0.4}.
        """
        return {
            self._token_name(likely["token"], likely["token_id"]): _finite(likely["logprob"])
            for likely in (entry, *entry["top_logprobs"])
        }

    def _token_name(self, token: str, token_id: int) -> str:
        return _as_id(token_id) if self._tokens_as_ids else token

    def _skip_incomplete_character(self, entry: TokenLogprob, *, is_text_complete: bool) -> None:
        """If the token `entry` starts a new character, skip the incomplete character before it.

        The decoder then contains the first bytes of a character that no later token can complete.
        The text has U+FFFD in the place of these bytes.
        """
        raw = entry["bytes"]
        # In UTF-8, bytes 10xxxxxx continue a character. Any other byte starts a new one.
        if raw and raw[0] & 0xC0 != 0x80:
            incomplete_character = self._decoder.decode(b"", final=True)
            self._text.locate(incomplete_character, is_text_complete=is_text_complete)

    def _decode(self, entry: TokenLogprob) -> str:
        """Add the bytes of a token to the decoder, and return the characters that are now complete.

        Example: if the two bytes of the character "é" are in two tokens, the call for the first
        token returns "", and the call for the second token returns "é".
        """
        if entry["bytes"] is None:
            return entry["token"]
        return self._decoder.decode(bytes(entry["bytes"]))


class _LocatedText:
    """Finds the positions of the tokens' texts in the text of a choice, one token after the other.

    Attributes:
        next_position: the position at which the text of the next token is expected.
    """

    def __init__(self, text: str) -> None:
        self.next_position = 0
        self._recent_text = text  # the end of the text, from the position `_recent_start` on
        self._recent_start = 0

    def append(self, text: str) -> None:
        """Append text. Remove the text of the tokens that have already been located."""
        num_located_chars = min(self.next_position - self._recent_start, len(self._recent_text))
        self._recent_text = self._recent_text[num_located_chars:] + text
        self._recent_start += num_located_chars

    def locate(self, piece: str, *, is_text_complete: bool) -> int:
        """Return the position of the next token, and continue the search after this token.

        Example: in the text "ab cd", the pieces "ab" and " cd" return 0 and 2. A piece that is not
        in the text returns the position of the next token.

        Args:
            piece: the text of the token.
            is_text_complete: whether all text has arrived in which the piece can be. Otherwise, a
                piece whose text has not arrived yet gets the position directly after the previous
                token.
        """
        is_first_token = self.next_position == 0
        if is_first_token:  # some tokenizers put a space before it, which the text does not have
            piece = _without_added_space(piece, self._recent_text)
        position = self._find(piece, is_text_complete=is_text_complete)
        if position is None:
            end_of_text = self._recent_start + len(self._recent_text)
            return min(self.next_position, end_of_text)
        self.next_position = position + len(piece)
        return position

    def _find(self, piece: str, *, is_text_complete: bool) -> int | None:
        """Return the position of a token's text, `piece`, in the answer. Return None if not found.

        `_recent_text` contains only the text from the position `_recent_start` on.
        """
        expected_index = self.next_position - self._recent_start
        arrived = self._recent_text[expected_index : expected_index + len(piece)]
        if arrived == piece:
            return self.next_position
        # Perhaps only the beginning of the piece has arrived, such as "ab" or "" for the piece
        # "abc". The rest of the piece then follows at the same position.
        if not is_text_complete and piece.startswith(arrived):
            return self.next_position
        search_end = expected_index + _SEARCH_CHARS + len(piece)
        index = self._recent_text.find(piece, expected_index, search_end)
        return None if index < 0 else self._recent_start + index


def join_logprobs(parts: Iterable[Json]) -> Json:
    """Join the parts of a choice's log-probabilities into one field `logprobs`.

    Example: {"tokens": ["a"], ...} and {"tokens": ["b"], ...} return {"tokens": ["a", "b"], ...}.
    """
    total = _empty()
    for part in parts:
        for name, values in part.items():
            total[name].extend(values)
    return total


def _empty() -> Json:
    """Return the value of `logprobs` for a text completion that has no tokens."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _chat_entry(entry: TopLogprob, *, tokens_as_ids: bool) -> Json:
    """Return the log-probability of one token in the format of a chat completion."""
    return {
        "token": _as_id(entry["token_id"]) if tokens_as_ids else entry["token"],
        "logprob": _finite(entry["logprob"]),
        "bytes": entry["bytes"],
    }


def _without_added_space(piece: str, text: str) -> str:
    """Return the first token's text, without the spaces that some tokenizers put before it.

    Examples: " ab" and the text "ab cd" return "ab". " ab" and the text " ab cd" return " ab".
    """
    stripped = piece.lstrip(" ")
    has_extra_space = not text.startswith(piece) and text.startswith(stripped)
    return stripped if stripped and has_extra_space else piece


def _prompt_token_texts(
    prompt: str, token_ids: Sequence[int], logprobs: PromptLogprobs
) -> list[str]:
    """Return the text of each token of a prompt.

    The entries of `logprobs` contain the texts. The first token has no entry, so its text is the
    text of the prompt before the second token.

    Example: the prompt "a cat", and the entry of the second token with the text " cat", return
    ["a", " cat"].
    """
    later_texts = []
    for token_id, entries in zip(token_ids[1:], logprobs[1:], strict=True):
        assert entries is not None  # only the first token has no entries
        later_texts.append(entries[str(token_id)]["decoded_token"] or "")
    return [_first_token_text(prompt, later_texts), *later_texts]


def _first_token_text(prompt: str, others: Sequence[str]) -> str:
    """Return the text of a prompt's first token. `others` are the texts of the other tokens.

    Example: "a cat" and [" cat"] return "a". If `prompt` does not end with the joined texts of the
    other tokens, return the text before the second token, or "" if the prompt does not contain it.
    """
    rest = "".join(others)
    if prompt.endswith(rest):
        return prompt[: len(prompt) - len(rest)]
    return prompt[: max(prompt.find(others[0]), 0)]  # `find` returns -1 if the text is not found


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
