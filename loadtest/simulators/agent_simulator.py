"""Simulate coding agents that share a prefix cache with other requests, and compare two policies.

    python -m loadtest.simulators.agent_simulator
    python -m loadtest.simulators.agent_simulator --agents 40 --num-blocks 8192 --pause 60

Each agent sends turns. A turn repeats the whole conversation and adds a tool result. The next turn
follows after the answer and a pause, in which the agent runs a tool. Some turns start a branch: a
second agent that continues the same conversation in another way. All agents have the same system
prompt. Other clients send single prompts, which nobody sends again.

The policy "lru" sends no prompt_cache_key. The policy "sessions" sends one key for each agent. The
times come from the cost model of loadtest.simulators.scheduler_simulator, so they do not depend on
this machine.
"""

import heapq
import itertools
import random
import sys
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.simulators.scheduler_simulator import (
    ANSWER_TOKEN,
    Cost,
    percentiles,
    random_tokens,
    run_step,
)

POLICIES = ("lru", "sessions")
_SYSTEM_TOKENS = 2000
_MAX_TOKENS = 16_000  # an agent ends its conversation at this length
_BRANCH_SHARE = 0.1
_BRANCH_TURNS = 2
_BRANCH_DELAY_S = 1.0
_SINGLE_OUTPUT_TOKENS = 60
_HEAD = ("policy", "hit rate", "first token p50", "p90", "p99", "other requests p50", "p90",
         "simulated s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a simulation.

    Attributes:
        agents: the number of agents.
        turns: the number of turns of each agent.
        pause_s: the mean time between an answer and the next turn of an agent.
        singles_per_s: the mean number of other requests in a second.
        seed: the seed of all random numbers.
    """

    agents: int = 24
    turns: int = 12
    pause_s: float = 20.0
    singles_per_s: float = 1.0
    seed: int = 0


class Turn(NamedTuple):
    """One request of a simulation.

    Attributes:
        prompt: the tokens of the prompt.
        output_tokens: the number of tokens to generate.
        agent: the agent that sends the request; None for a single request.
    """

    prompt: list[int]
    output_tokens: int
    agent: "Agent | None" = None


@dataclass(slots=True)
class Agent:
    """An agent that sends turns.

    Attributes:
        name: the prompt_cache_key.
        rng: the agent's random numbers.
        tokens: the conversation so far.
        turns_left: the number of turns that the agent still sends.
    """

    name: str
    rng: random.Random
    tokens: list[int]
    turns_left: int

    def next_turn(self) -> Turn:
        """Add a tool result to the conversation, and return the next request."""
        self.turns_left -= 1
        num_result_tokens = self.rng.randint(100, 1200)
        # A new list is made, because earlier turns and branches share the old list.
        self.tokens = self.tokens + random_tokens(self.rng, num_result_tokens)
        return Turn(self.tokens, self.rng.randint(40, 200), self)

    def note_answer(self, num_tokens: int) -> None:
        """Add an answer to the conversation."""
        self.tokens = self.tokens + [ANSWER_TOKEN] * num_tokens
        if len(self.tokens) > _MAX_TOKENS:
            self.turns_left = 0

    def branch(self, number: int) -> "Agent":
        """Return an agent that continues the same conversation in another way."""
        name = f"{self.name}/{number}"
        num_turns = min(_BRANCH_TURNS, self.turns_left)
        return Agent(name, random.Random(name), self.tokens, num_turns)


@dataclass(slots=True)
class Running:
    """A request in the scheduler. `has_started` is set after the first token."""

    turn: Turn
    sent_s: float
    has_started: bool = False


@dataclass(order=True, slots=True)
class Later:
    """A request that will be sent later: the next turn of `agent`, or a single request if None.

    The number determines the order of requests with the same time.
    """

    time_s: float
    number: int
    agent: Agent | None = field(compare=False)


@dataclass(slots=True)
class Outcome:
    """The results of one policy.

    Attributes:
        first_token_s: the times to the first token of the agents' turns except the first turns.
        single_first_token_s: the times to the first token of the other requests.
        num_prompt_tokens: the number of prompt tokens in the agents' turns except the first turns.
        num_cached_tokens: the number of these tokens that were found in the prefix cache.
        elapsed_s: the simulated time.
    """

    first_token_s: list[float] = field(default_factory=list)
    single_first_token_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the agents' prompt tokens that were found in the prefix cache."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def row(self, policy: str) -> list[str]:
        """Return the row of the table for a policy."""
        agents = percentiles(self.first_token_s)
        singles = percentiles(self.single_first_token_s)
        times = (agents.p50, agents.p90, agents.p99, singles.p50, singles.p90)
        return [
            policy,
            f"{self.hit_rate:.1%}",
            *(f"{time_s:.2f}" for time_s in times),
            f"{self.elapsed_s:.0f}",
        ]


class Simulation:
    """One run of the traffic with one of POLICIES."""

    def __init__(
        self, traffic: Traffic, policy: str, num_blocks: int, block_size: int, cost: Cost
    ) -> None:
        """Create the agents, and a scheduler with `num_blocks` KV cache blocks."""
        self._traffic = traffic
        self._has_keys = policy == "sessions"
        self._cost = cost
        self._now_s = 0.0
        self._scheduler = Scheduler(
            BlockPool(num_blocks, clock=lambda: self._now_s),
            block_size=block_size,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
        )
        self._outcome = Outcome()
        self._singles_rng = random.Random(f"singles {traffic.seed}")
        self._ids = itertools.count()
        self._branch_numbers = itertools.count()
        self._future_requests: list[Later] = []  # a heap, the earliest request first
        self._running: dict[str, Running] = {}
        self._num_agents = traffic.agents
        system = random_tokens(random.Random("system"), _SYSTEM_TOKENS)
        for number in range(traffic.agents):
            rng = random.Random(f"agent {number} {traffic.seed}")
            agent = Agent(f"agent-{number}", rng, system, traffic.turns)
            self._send_later(agent, rng.uniform(0, traffic.pause_s))
        self._send_single_later()

    def run(self) -> Outcome:
        """Run steps until all agents have ended, and return the results."""
        while self._num_agents:
            if not self._scheduler.has_work():  # an idle scheduler waits for the next request
                self._now_s = max(self._now_s, self._future_requests[0].time_s)
            while self._future_requests and self._future_requests[0].time_s <= self._now_s:
                self._send(heapq.heappop(self._future_requests).agent)
            step = run_step(self._scheduler)
            self._now_s += self._cost.of(step.plan)
            for update in step.updates:
                self._note_token(update)
        self._outcome.elapsed_s = self._now_s
        return self._outcome

    def _send_later(self, agent: Agent | None, delay_s: float) -> None:
        heapq.heappush(self._future_requests, Later(self._now_s + delay_s, next(self._ids), agent))

    def _send_single_later(self) -> None:
        self._send_later(None, self._singles_rng.expovariate(self._traffic.singles_per_s))

    def _send(self, agent: Agent | None) -> None:
        """Send the next turn of an agent, or a single request if `agent` is None."""
        if agent is None:
            self._submit(self._single(), key="")
            self._send_single_later()
        else:
            self._submit(agent.next_turn(), key=agent.name if self._has_keys else "")

    def _single(self) -> Turn:
        """Return a single request with a random prompt of about 1,200 tokens."""
        length = min(6000, 100 + int(self._singles_rng.lognormvariate(mu=7.0, sigma=0.7)))
        return Turn(random_tokens(self._singles_rng, length), _SINGLE_OUTPUT_TOKENS)

    def _submit(self, turn: Turn, key: str) -> None:
        """Add a request to the scheduler. `key` is the prompt_cache_key, or ""."""
        request_id = str(next(self._ids))
        params = SamplingParams(max_tokens=turn.output_tokens, prompt_cache_key=key)
        length = len(turn.prompt) + turn.output_tokens
        self._running[request_id] = Running(turn, self._now_s)
        self._scheduler.add(Sequence(request_id, turn.prompt, params, max_total_tokens=length))

    def _note_token(self, update: RequestUpdate) -> None:
        """Record a new token of a request, and let its agent continue after the last token."""
        running = self._running[update.request_id]
        turn = running.turn
        if not running.has_started:
            running.has_started = True
            self._note_first_token(turn, self._now_s - running.sent_s, update.num_cached_tokens)
        if update.finish_reason is not None:
            del self._running[update.request_id]
            if turn.agent is not None:
                turn.agent.note_answer(turn.output_tokens)
                self._continue(turn.agent)

    def _note_first_token(self, turn: Turn, delay_s: float, num_cached_tokens: int) -> None:
        """Record the time to the first token. The first turn of an agent is left out."""
        outcome = self._outcome
        if turn.agent is None:
            outcome.single_first_token_s.append(delay_s)
        elif turn.agent.turns_left < self._traffic.turns - 1:
            outcome.first_token_s.append(delay_s)
            outcome.num_prompt_tokens += len(turn.prompt)
            outcome.num_cached_tokens += num_cached_tokens

    def _continue(self, agent: Agent) -> None:
        """Plan the next turn of an agent after an answer. Some agents also start a branch."""
        if not agent.turns_left:
            self._num_agents -= 1
            return
        self._send_later(agent, agent.rng.expovariate(1 / self._traffic.pause_s))
        if agent.rng.random() < _BRANCH_SHARE:
            self._num_agents += 1
            self._send_later(agent.branch(next(self._branch_numbers)), _BRANCH_DELAY_S)


def compare(traffic: Traffic, num_blocks: int, block_size: int, cost: Cost) -> dict[str, Outcome]:
    """Return the results of each policy for the same traffic."""
    return {
        policy: Simulation(traffic, policy, num_blocks, block_size, cost).run()
        for policy in POLICIES
    }


def main(argv: abc.Sequence[str] | None = None) -> None:
    """Simulate the traffic of the command line with each policy, and print a table."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    usual = Traffic()
    add("--agents", type=int, default=usual.agents, help="number of agents")
    add("--turns", type=int, default=usual.turns, help="turns of each agent")
    add("--pause", type=float, default=usual.pause_s, help="mean pause between turns, in seconds")
    add("--singles", type=float, default=usual.singles_per_s, help="single requests per second")
    add("--seed", type=int, default=0, help="seed of the traffic")
    add("--num-blocks", type=int, default=12_288, help="number of KV cache blocks")
    add("--block-size", type=int, default=16, help="tokens of each KV cache block")
    args = parser.parse_args(argv)
    traffic = Traffic(args.agents, args.turns, args.pause, args.singles, args.seed)
    outcomes = compare(traffic, args.num_blocks, args.block_size, Cost())
    rows = [outcome.row(policy) for policy, outcome in outcomes.items()]
    sys.stdout.write(table(_HEAD, rows) + "\n")


if __name__ == "__main__":
    main()
