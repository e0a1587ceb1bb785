# SPDX-License-Identifier: Apache-2.0
"""The engine, which generates tokens for many requests at the same time.

The main loop is in step_loop.py.
"""

import logging
from collections import abc
from collections.abc import Callable
from functools import partial
from typing import Any

from nereid_backend.config import EngineConfig
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import EngineInfo, EngineStats, RequestOutput, RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.engine.engine_parts import EngineParts
from nereid_backend.engine.offline import generate
from nereid_backend.engine.prefix_sessions import PrefixSessions
from nereid_backend.engine.reload_weights import ReloadableModel
from nereid_backend.vision.chat_processor import ImagePrompt

logger = logging.getLogger(__name__)


class Engine:
    """Generates tokens for many requests at the same time.

    An engine is not thread-safe: only one thread may call its methods.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        """Load the model, check its logits, and allocate the KV cache.

        The check compares the logits of the engine's steps with the logits of a plain forward pass.

        Args:
            config: the settings.
            progress: this function is called with one line of text for each slow phase of loading.
                None writes the lines to the log.

        Raises:
            ConfigError: if the settings do not fit the machine or the model.
            ModelError: if the checkpoint is missing or broken, or the architecture is unsupported.
        """
        self._model = ReloadableModel(config, progress or logger.info)

    @property
    def _parts(self) -> EngineParts:
        """The loaded model and the objects that depend on it; `reload` replaces all of them."""
        return self._model.parts

    @property
    def info(self) -> EngineInfo:
        """A description of the loaded model and of the engine's limits."""
        return self._parts.info

    @property
    def sessions(self) -> PrefixSessions:
        """The object that lists, extends and removes the sessions of the prefix cache."""
        return self._parts.sessions

    def step(self) -> list[RequestUpdate]:
        """Plan and run a step, and return the new tokens of the sequences in the step.

        The call first starts the requests whose preparation has ended (a grammar is compiled, or a
        cached prefix is read from disk), and activates the compiled forward pass of the model if
        the compiler has finished. If a step fails, its sequences end with an error and the engine
        continues. If every request is still being prepared, the call returns after some
        milliseconds.

        With async_scheduling, the next step is already running when the call returns. If the next
        step could not start, each of its sequences gets a second update, which ends the sequence.

        Returns:
            One update for each sequence that got tokens or ended. Example: if the step computes the
            end of the prompt of "a" and one more token of "b", the updates contain the first output
            token of "a" and the next output token of "b".

        Raises:
            EngineError: if the device or a process of tensor parallelism is lost, or if
                max_step_failures steps in a row have failed. After this error, the engine cannot be
                used any more.
        """
        parts = self._parts
        if parts.ranks is not None:
            parts.ranks.check()  # raises an error if another process of the model has ended
        parts.advance_model_compilation()
        parts.preparation.start_prepared()
        updates = parts.loop.step()
        if parts.disk is not None:
            parts.disk.save()  # copies the new blocks of the prefix cache to disk
        if parts.scheduler.num_running == 0:
            parts.loop.pause()
            if not updates:
                # All requests are still being prepared. Wait here, because the caller would
                # otherwise call `step` in a busy loop.
                parts.preparation.wait()
        return updates

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        """Add a request. Later calls of `step` compute its tokens.

        Args:
            request_id: an id that differs from the ids of all unfinished requests.
            prompt_token_ids: at least one token id. All ids must be less than info.vocab_size.
            params: the sampling parameters; None selects the defaults.
            images: the images of the prompt; None if the prompt contains no image.

        Raises:
            RequestError: if the request is invalid, or if it has images and the model accepts none.
            CapacityError: if max_num_waiting requests are waiting already, or too many grammars
                are waiting to be compiled.
        """
        parts = self._parts
        # `create` validates the request, and returns the first of its n sequences. The scheduler
        # creates the other sequences as copies of the first sequence.
        first_sequence = parts.new_sequences.create(
            request_id, prompt_token_ids, params or SamplingParams(), images
        )
        # Pass the request to the scheduler. Start to compile the grammar of the request, if it has
        # one, and start to read the cached prefix of the request from disk.
        parts.preparation.add(first_sequence)

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter. Requests can then select the adapter with `lora_name`.

        If an adapter with this name exists, the new adapter replaces it for new requests.

        Args:
            name: the name of the adapter.
            path: a folder in the layout of the library PEFT.

        Raises:
            RequestError: if the files are missing or broken, or the adapter does not fit the model.
            CapacityError: if the adapters of unfinished requests leave too little memory.
        """
        self._parts.load_lora(name, path)

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that use the adapter continue until they end.

        Raises:
            RequestError: if no adapter has this name.
        """
        self._parts.adapters.unload(name)

    def reload(self, path: str = "", progress: Callable[[str], None] | None = None) -> None:
        """Replace the weights of the model with the weights of another checkpoint.

        The new checkpoint must have the same tensors as the present checkpoint. The LoRA adapters
        are loaded again, and the prefix cache is empty afterwards. If the new checkpoint is
        refused, the engine continues with the old weights.

        On a CPU with enough free memory, the new weights are loaded before the old weights are
        freed. Otherwise, the old weights are freed first. If the new checkpoint then cannot be
        loaded, the old checkpoint is loaded again.

        Args:
            path: the folder of the new checkpoint; "" reads the present folder again.
            progress: see the constructor.

        Raises:
            RequestError: if requests are running, if the weights of this engine cannot be replaced
                (tensor parallelism, GGUF files), or if the new checkpoint is broken or has other
                tensors than the present checkpoint.
            EngineError: if the old checkpoint could not be loaded again. After this error, the
                engine cannot be used any more.
        """
        self._model.reload(path, progress or logger.info)

    @property
    def lora_names(self) -> list[str]:
        """The names of the loaded LoRA adapters."""
        return self._parts.adapters.names

    def warm_up(self) -> None:
        """Load the grammar libraries in the background. Loading takes some seconds.

        Without this call, the first request with a grammar waits for the libraries.
        """
        self._parts.preparation.warm_up()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request. If `index` is given, abort only this sequence of the request.

        The next call of `step` returns the last update of each aborted sequence. Do nothing if the
        request is unknown or has ended.

        Without async_scheduling, the blocks of the request become free immediately. With
        async_scheduling, the blocks become free after the running step.
        """
        parts = self._parts
        parts.scheduler.abort(request_id, index)
        # The preparation of a request compiles its grammar and reads its cached prefix from disk.
        # Do not cancel the preparation while another sequence of the request still needs it.
        needs_preparation = parts.scheduler.is_preparing(request_id)
        if not needs_preparation:
            parts.preparation.cancel(request_id)

    def has_work(self) -> bool:
        """Return whether there is work for which `step` must be called.

        The result is True if the next call of `step` would compute tokens, return updates or raise
        an error.
        """
        parts = self._parts
        has_lost_rank = parts.ranks is not None and parts.ranks.has_lost_rank
        return parts.scheduler.has_work() or has_lost_rank

    def is_swapping(self) -> bool:
        """Return whether the next call of `step` would test or activate a compiled forward pass.

        `has_work` ignores this work, because it belongs to no request. If `step` is called for this
        work while no request runs, the work does not delay later requests.
        """
        swap = self._parts.swap
        return swap is not None and swap.is_ready

    def generate(
        self,
        prompt_token_ids: abc.Sequence[abc.Sequence[int]],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answers to prompts and return them in the order of the prompts.

        Args:
            prompt_token_ids: one list of token ids for each prompt.
            params: the sampling parameters for all prompts, or a list with one item for each
                prompt. None selects the defaults.

        Raises:
            RequestError: if a prompt or a parameter is invalid, or if the engine has other
                requests.
        """
        # The function `decode` converts the token ids of an answer to the text of the answer.
        return generate(self, prompt_token_ids, params, self._parts.decode)

    def chat(
        self, messages: abc.Sequence[abc.Mapping[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer the messages of a chat, which may contain images, videos and audio.

        The checkpoint's own processor renders and tokenises the messages and prepares the images.
        If the checkpoint has no chat template, the prompt consists of the images and the texts.

        Example of a message: {"role": "user", "content": [{"type": "image_url", "image_url":
        {"url": "data:image/png;base64,..."}}, {"type": "text", "text": "What is this?"}]}.

        Args:
            messages: messages in the format of OpenAI's chat completions. An image part has the
                type "image_url" or "image". The image is a data URL, the bytes of an image file or
                an image of Pillow. An audio part is {"type": "input_audio", "input_audio": {"data":
                BASE64, "format": "wav"}}, or {"type": "audio", "audio": SAMPLES, "sampling_rate":
                16000} with an array of samples between -1 and 1.
            params: the sampling parameters; None selects the defaults.

        Raises:
            RequestError: if a message, an image or a parameter is invalid, if the model accepts no
                images, or if the engine has other requests.
            ModelError: if the processor needs a package that is not installed.
        """
        prompt = self.image_prompt(messages)

        # `prompt.images` also contains the videos and the audio of the messages.
        add_request = partial(self.add_request, images=prompt.images)
        [output] = generate(
            self, [prompt.token_ids], params, self._parts.decode, add_request=add_request
        )
        return output

    def image_prompt(self, messages: abc.Sequence[abc.Mapping[str, Any]]) -> ImagePrompt:
        """Convert the messages of a chat to the token ids and images that `add_request` accepts.

        Args:
            messages: see `chat`.

        Raises:
            RequestError: if a message or an image is invalid, or if the model accepts no images.
            ModelError: if the processor needs a package that is not installed.
        """
        return self._parts.chat_processor.prepare(messages)

    def close(self) -> None:
        """Stop the engine's threads and processes, and unregister its attention function."""
        self._parts.close()

    @property
    def compiled(self) -> list[tuple[str, float, float]]:
        """The requests whose compiled grammars the engine received at the start of the last step.

        `StepEngine.compiled` describes the items of the list.
        """
        return self._parts.preparation.compiled

    @property
    def started(self) -> list[tuple[str, float]]:
        """The requests whose first tokens were planned in the last step.

        Each item contains the request id, and the start time of the step by time.monotonic(). If a
        request is preempted before its first output token, the request appears in a later step
        again.
        """
        return self._parts.loop.started

    def stats(self) -> EngineStats:
        """Return the present load of the engine, and the counters since its start."""
        parts = self._parts
        scheduler = parts.scheduler
        # `cache`, `drafts` and `features` are None if the engine does not use these objects.
        cache = scheduler.cache
        drafts = scheduler.drafter.lengths if scheduler.drafter else None
        features = parts.images.features
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_blocks_used=parts.pool.num_used,
            kv_cache_blocks=parts.info.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_cache_queries=cache.num_queried_tokens if cache else 0,
            num_prefix_cache_hits=cache.num_hit_tokens if cache else 0,
            num_drafts=drafts.num_drafts if drafts else 0,
            num_proposed_tokens=drafts.num_proposed if drafts else 0,
            num_accepted_tokens=drafts.num_accepted if drafts else 0,
            num_image_encodings=features.num_encoded if features else 0,
        )

    def check(self) -> None:
        """Check that the scheduler's records of blocks, rows and requests are consistent.

        Raises:
            AssertionError: if the records are inconsistent, for example because a block was lost.
        """
        self._parts.scheduler.check()
