"""Log-probabilities of deltas -> the shapes that chat and text completions have for them."""

import codecs
from collections.abc import Iterable, Sequence

from nereid_client.streaming.completion_frame import Json
from nereid_client.streaming.deltas import PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob

_FLOOR = -9999.0  # JSON has no infinity; OpenAI and vLLM give this for an impossible token
_LOOK_AHEAD_CHARS = 4  # what a character costs at most whose tokens can't be told apart


def chat_logprobs(entries: Iterable[TokenLogprob], tokens_as_ids: bool = False) -> Json:
    """`choices[].logprobs` of a chat completion or one of its chunks."""
    content = [
        _chat_entry(entry, tokens_as_ids)
        | {"top_logprobs": [_chat_entry(top, tokens_as_ids) for top in entry["top_logprobs"]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(given: PromptLogprobs) -> list[Json | None]:
    """`prompt_logprobs` in vLLM's shape: None for the first token."""
    return [
        None if at is None else {token: _prompt_entry(one) for token, one in at.items()}
        for at in given
    ]


class CompletionLogprobs:
    """`choices[].logprobs` of a text completion, piece by piece: each token's exactly once.

    `text_offset` says where in the choice's text a token begins, in characters. A token that is
    not in the text (the end token, a hidden special token, what a stop string cut off) stands where
    the next one does.
    """

    def __init__(self, tokens_as_ids: bool = False, echo: str = "") -> None:
        """For one choice, whose text begins with `echo`, the prompt's."""
        self._tokens_as_ids = tokens_as_ids
        self._text = echo
        self._base = 0  # where _text begins in the choice's text; what is behind us gets dropped
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prompt(self, token_ids: Sequence[int], given: PromptLogprobs) -> Json:
        """The part of the prompt, to be taken before any other.

        Args:
            token_ids: of the prompt.
            given: their log-probabilities; None for the first token, whose text is what comes
                before the second's.
        """
        tokens = [""]
        for token_id, at in zip(token_ids[1:], given[1:], strict=True):
            tokens.append((at or {})[str(token_id)]["decoded_token"] or "")
        tokens[0] = _first_token(self._text, tokens[1:])
        part = _empty()
        for token, token_id, at in zip(tokens, token_ids, given, strict=True):
            part["tokens"].append(self._name(token, token_id))
            part["text_offset"].append(self._place(token, is_last=True))
            if at is None:
                part["token_logprobs"].append(None)
                part["top_logprobs"].append(None)
                continue
            part["token_logprobs"].append(_finite(at[str(token_id)]["logprob"]))
            part["top_logprobs"].append(
                {
                    self._name(one["decoded_token"] or "", int(other)): _finite(one["logprob"])
                    for other, one in at.items()
                }
            )
        self._position = self._base + len(self._text)
        return part

    def add(self, text: str, entries: Iterable[TokenLogprob], is_last: bool) -> Json:
        """The part of one delta.

        Args:
            text: what the delta adds to the choice's text; may be behind its tokens.
            entries: the delta's log-probabilities.
            is_last: whether the text is complete with this.
        """
        self._extend(text)
        part = _empty()
        for entry in entries:
            piece = self._piece(entry, is_last)
            part["text_offset"].append(self._place(piece, is_last))
            part["tokens"].append(self._name(entry["token"], entry["token_id"]))
            part["token_logprobs"].append(_finite(entry["logprob"]))
            part["top_logprobs"].append(
                {
                    self._name(one["token"], one["token_id"]): _finite(one["logprob"])
                    for one in (entry, *entry["top_logprobs"])
                }
            )
        return part

    def _name(self, token: str, token_id: int) -> str:
        return _as_id(token_id) if self._tokens_as_ids else token

    def _piece(self, entry: TokenLogprob, is_last: bool) -> str:
        """The characters that the token completes."""
        if entry["bytes"] is None:
            return entry["token"]
        raw = bytes(entry["bytes"])
        if raw and raw[0] & 0xC0 != 0x80:  # no continuation of the character before, broken or not
            self._place(self._decoder.decode(b"", final=True), is_last)
        return self._decoder.decode(raw)

    def _extend(self, text: str) -> None:
        behind = min(self._position - self._base, len(self._text))
        self._text = self._text[behind:] + text
        self._base += behind

    def _place(self, piece: str, is_last: bool) -> int:
        """Where the piece begins in the text; moves on behind it."""
        at = self._position - self._base
        known = self._text[at : at + len(piece)]
        if self._position == 0 and known != piece:
            # A tokenizer may give its first word a blank that the text does not have.
            stripped = piece.lstrip(" ")
            if stripped and self._text.startswith(stripped):
                self._position = len(stripped)
                return 0
        if known == piece or (not is_last and piece.startswith(known)):
            begin = at
        else:
            begin = self._text.find(piece, at, at + _LOOK_AHEAD_CHARS + len(piece))
        if begin < 0:
            return min(self._position, self._base + len(self._text))
        self._position = self._base + begin + len(piece)
        return self._base + begin


def joined(parts: Iterable[Json]) -> Json:
    """Parts of one choice's `logprobs`, one after the other."""
    total = _empty()
    for part in parts:
        for name, values in part.items():
            total[name].extend(values)
    return total


def _empty() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _prompt_entry(one: PromptLogprob) -> Json:
    return {**one, "logprob": _finite(one["logprob"])}


def _chat_entry(entry: TopLogprob, tokens_as_ids: bool) -> Json:
    return {
        "token": _as_id(entry["token_id"]) if tokens_as_ids else entry["token"],
        "logprob": _finite(entry["logprob"]),
        "bytes": entry["bytes"],
    }


def _first_token(text: str, others: Sequence[str]) -> str:
    rest = "".join(others)
    if text.endswith(rest):
        return text[: len(text) - len(rest)]
    before, found, _ = text.partition(others[0])
    return before if found else ""


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
