# SPDX-License-Identifier: Apache-2.0
"""Generates the outputs of a list of prompts directly with an engine, without a server."""

from collections import deque
from collections.abc import Callable, Sequence

from nereid_backend.core.outputs import CompletionOutput, RequestOutput, RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.engine.engine_protocol import StepEngine
from nereid_backend.errors import CapacityError, RequestError

Decode = Callable[[list[int]], str]
AddRequest = Callable[[str, Sequence[int], SamplingParams], None]


def generate(
    engine: StepEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    decode: Decode,
    add_request: AddRequest | None = None,
) -> list[RequestOutput]:
    """Run an idle engine until the output of every prompt is complete.

    Args:
        engine: an engine without requests.
        prompts: the token ids of each prompt.
        params: the sampling parameters of all prompts, or a list with the sampling parameters of
            each prompt. None selects the defaults.
        decode: a function that converts token ids to text.
        add_request: adds a request to the engine; None means `engine.add_request`.

    Returns:
        One output for each prompt, in the order of the prompts.

    Raises:
        RequestError: a prompt or a parameter is wrong, or the engine has other requests. All
            requests of this call have been removed from the engine.
    """
    if engine.has_work():
        raise RequestError(
            "generate: the engine still has other requests. Wait until they have ended."
        )
    params = params or SamplingParams()
    params_list = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if len(params_list) != len(prompts):
        raise RequestError(
            f"params: there must be one SamplingParams for each of the {len(prompts)} prompts, but "
            f"there are {len(params_list)}."
        )
    outputs = {f"generate-{i}": _PartialOutput() for i in range(len(prompts))}
    requests = deque(zip(outputs, prompts, params_list, strict=True))
    try:
        while requests or engine.has_work():
            _add_requests(add_request or engine.add_request, requests)
            for update in engine.step():
                outputs[update.request_id].add(update)
    except BaseException:
        for request_id in outputs:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()
        raise
    return [
        output.build(request_id, list(prompt), decode)
        for (request_id, output), prompt in zip(outputs.items(), prompts, strict=True)
    ]


def _add_requests(
    add_request: AddRequest, requests: deque[tuple[str, Sequence[int], SamplingParams]]
) -> None:
    """Add requests to the engine until the engine's waiting queue is full.

    Args:
        add_request: adds one request to the engine.
        requests: the id, the prompt's token ids and the parameters of each request. Mutated: the
            requests that were added are removed.
    """
    while requests:
        try:
            add_request(*requests[0])
        except CapacityError:
            return  # The waiting queue is full. The caller tries again after the next step.
        requests.popleft()


class _PartialOutput:
    """The updates that one unfinished request has received so far."""

    def __init__(self) -> None:
        # Maps the index of each sequence to the updates of the sequence.
        self._updates: dict[int, list[RequestUpdate]] = {}

    def add(self, update: RequestUpdate) -> None:
        """Store the new tokens and other results that the engine has returned for the request.

        Raises:
            RequestError: the engine refused the request before its first token.
        """
        if update.is_refused and not self._updates:
            raise RequestError(update.error)
        self._updates.setdefault(update.index, []).append(update)

    def build(self, request_id: str, prompt: list[int], decode: Decode) -> RequestOutput:
        """Return the output of the request. All sequences of the request must have ended."""
        first = self._updates[0][0]
        return RequestOutput(
            request_id,
            prompt,
            [_completion(updates, decode) for _, updates in sorted(self._updates.items())],
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
        )


def _completion(updates: list[RequestUpdate], decode: Decode) -> CompletionOutput:
    """Return the complete output of one sequence, built from its updates.

    Example: three updates contain the tokens [5], [6] and [2], and the last update has the
    finish_reason "stop". The output has the token ids [5, 6, 2] and the text of the tokens [5, 6].
    """
    last = updates[-1]
    assert last.finish_reason is not None
    token_ids = [token_id for update in updates for token_id in update.new_token_ids]
    text_token_ids = token_ids
    if last.finish_reason == "stop":
        # The engine uses the reason "stop" only for stop tokens, so the last token is a stop token.
        # Stop strings do not matter here, because only the servers search answers for stop strings.
        text_token_ids = token_ids[:-1]
    logprobs = None
    if any(update.logprobs is not None for update in updates):
        logprobs = [entry for update in updates for entry in update.logprobs or ()]
    return CompletionOutput(
        index=last.index,
        token_ids=token_ids,
        text=decode(text_token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cumulative_logprob=last.cumulative_logprob,
        error=last.error,
        logprobs=logprobs,
    )
