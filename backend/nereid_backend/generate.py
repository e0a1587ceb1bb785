# SPDX-License-Identifier: Apache-2.0
"""The offline door: prompts in, finished answers out."""

from collections.abc import Callable, Sequence
from typing import Protocol

from nereid_backend.core.outputs import (
    CompletionOutput,
    EngineInfo,
    RequestOutput,
    RequestUpdate,
)
from nereid_backend.core.params import SamplingParams
from nereid_backend.errors import CapacityError, RequestError

Decode = Callable[[list[int]], str]


class _Steps(Protocol):
    """What is needed of an engine here."""

    info: EngineInfo

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams | None
    ) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[RequestUpdate]: ...

    def has_work(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...


def generate(
    engine: _Steps,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    decode: Decode,
) -> list[RequestOutput]:
    """Run an idle engine until every prompt is answered.

    Args:
        engine: has no requests in work.
        prompts: token ids.
        params: for all prompts, or one for each.
        decode: token ids to text.

    Raises:
        RequestError: a prompt or parameter is wrong (then nothing is left in the engine), or the
            engine is not idle.
    """
    if engine.has_work():
        raise RequestError("generate: the engine has other requests in work; wait for their end")
    each = [params] * len(prompts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(prompts):
        raise RequestError(f"params: {len(each)} were given for {len(prompts)} prompts")
    token_ids: dict[str, list[int]] = {f"generate-{i}": [] for i in range(len(prompts))}
    last: dict[str, RequestUpdate] = {}
    pending = iter(zip(token_ids, prompts, each, strict=True))
    waiting = next(pending, None)
    try:
        while waiting is not None or engine.has_work():
            while waiting is not None:
                try:
                    engine.add_request(*waiting)
                except CapacityError:
                    break  # the rest is added as the queue empties
                waiting = next(pending, None)
            for update in engine.step():
                token_ids[update.request_id] += update.new_token_ids
                last[update.request_id] = update
    except BaseException:
        for request_id in token_ids:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()
        raise
    return [
        RequestOutput(
            request_id,
            list(prompt),
            [_completion(token_ids[request_id], last[request_id], decode)],
        )
        for request_id, prompt in zip(token_ids, prompts, strict=True)
    ]


def _completion(token_ids: list[int], last: RequestUpdate, decode: Decode) -> CompletionOutput:
    assert last.finish_reason is not None
    visible = token_ids[:-1] if last.finish_reason == "stop" else token_ids
    return CompletionOutput(
        index=0,
        token_ids=token_ids,
        text=decode(visible),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cumulative_logprob=last.cumulative_logprob,
        error=last.error,
    )
