"""A program that measures Nereid's engine, which runs in the process of the program."""

from nereid_backend import Engine, EngineConfig, SamplingParams

from loadtest.peers.workload import Peer, Prompts, Settings, Workload, main


class Nereid(Peer):
    """Nereid's engine. The prefix cache has no effect, because every prompt is random."""

    def __init__(self, path: str, workload: Workload, settings: Settings) -> None:
        defaults = {
            # The engine would otherwise compile the model during the measurement.
            "compile_forward": False,
            # A model with random weights repeats itself, so speculative decoding would make the
            # engine faster than with real text.
            "num_speculative_tokens": 0,
        }
        self._engine = Engine(
            EngineConfig(
                path,
                dtype=workload.dtype,
                num_threads=workload.threads,
                **{**defaults, **settings},
            )
        )

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly `num_tokens` tokens for each prompt, greedily, in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self._engine.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    def memory(self) -> dict[str, float]:
        """Return the bytes of the weights, and the bytes of 1,000 tokens in the KV cache."""
        info = self._engine.info
        # The KV cache contains one block more than the engine uses for requests.
        bytes_per_token = info.kv_cache_bytes / (info.num_blocks + 1) / info.block_size
        return {
            "weights_bytes": info.weights_bytes,
            "cache_bytes_per_1000_tokens": 1000 * bytes_per_token,
        }


if __name__ == "__main__":
    main(Nereid)
