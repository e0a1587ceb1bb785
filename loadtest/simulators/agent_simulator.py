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
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepResult

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.simulators.scheduler_simulator import Cost, percentiles

POLICIES = ("lru", "sessions")
_ANSWER_TOKEN = 1
_SYSTEM_TOKENS = 2000
_MAX_TOKENS = 16_000  # an agent ends its conversation at this length
_BRANCH_SHARE = 0.1


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
        self.tokens = self.tokens + _random_tokens(self.rng, self.rng.randint(100, 1200))
        return Turn(self.tokens, self.rng.randint(40, 200), self)

    def note_answer(self, num_tokens: int) -> None:
        """Add an answer to the conversation."""
        self.tokens = self.tokens + [_ANSWER_TOKEN] * num_tokens
        if len(self.tokens) > _MAX_TOKENS:
            self.turns_left = 0

    def branch(self, number: int) -> "Agent":
        """Return an agent that continues the same conversation in another way."""
        name = f"{self.name}/{number}"
        return Agent(name, random.Random(name), self.tokens, min(2, self.turns_left))


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
        agents = [f"{value:.2f}" for value in percentiles(self.first_token_s)[:3]]
        singles = [f"{value:.2f}" for value in percentiles(self.single_first_token_s)[:2]]
        return [policy, f"{self.hit_rate:.1%}", *agents, *singles, f"{self.elapsed_s:.0f}"]


class Simulation:
    """One run of the traffic with one policy."""

    def __init__(self, traffic: Traffic, policy: str, scheduler: Scheduler, cost: Cost) -> None:
        """Create the agents.

        Args:
            traffic: the requests.
            policy: one of POLICIES.
            scheduler: a scheduler without requests. The clock of its pool must be `time`.
            cost: the cost model of a step.
        """
        self._traffic = traffic
        self._has_keys = policy == "sessions"
        self._scheduler = scheduler
        self._cost = cost
        self.now = 0.0
        self.outcome = Outcome()
        self._rng = random.Random(f"singles {traffic.seed}")
        self._ids = itertools.count()
        self._branches = itertools.count()
        # The time, a number and the agent of each later request. If two times are equal, the number
        # determines the order.
        self._pending: list[tuple[float, int, Agent | None]] = []
        self._running: dict[str, tuple[Turn, float, bool]] = {}
        self._num_agents = 0
        system = _random_tokens(random.Random("system"), _SYSTEM_TOKENS)
        for number in range(traffic.agents):
            rng = random.Random(f"agent {number} {traffic.seed}")
            self._num_agents += 1
            agent = Agent(f"agent-{number}", rng, system, traffic.turns)
            self._send_later(agent, rng.uniform(0, traffic.pause_s))
        self._send_later(None, self._rng.expovariate(traffic.singles_per_s))

    def run(self) -> Outcome:
        """Run steps until all agents have ended, and return the results."""
        scheduler = self._scheduler
        while self._num_agents:
            if not scheduler.has_work():
                self.now = max(self.now, self._pending[0][0])
            while self._pending and self._pending[0][0] <= self.now:
                self._send(heapq.heappop(self._pending)[2])
            plan = scheduler.plan()
            self.now += self._cost.of(plan)
            answers = [Sampled([_ANSWER_TOKEN], [0.0]) for chunk in plan.chunks if chunk.samples]
            for update in scheduler.commit(plan, StepResult(answers)):
                is_end = update.finish_reason is not None
                self._note(update.request_id, update.num_cached_tokens, is_end)
        self.outcome.elapsed_s = self.now
        return self.outcome

    def _send_later(self, agent: Agent | None, delay_s: float) -> None:
        heapq.heappush(self._pending, (self.now + delay_s, next(self._ids), agent))

    def _send(self, agent: Agent | None) -> None:
        """Send the next turn of an agent, or a single request."""
        key = ""
        if agent is None:
            length = min(6000, 100 + int(self._rng.lognormvariate(7.0, 0.7)))
            turn = Turn(_random_tokens(self._rng, length), 60)
            self._send_later(None, self._rng.expovariate(self._traffic.singles_per_s))
        else:
            turn = agent.next_turn()
            key = agent.name if self._has_keys else ""
        request_id = str(next(self._ids))
        params = SamplingParams(max_tokens=turn.output_tokens, prompt_cache_key=key)
        length = len(turn.prompt) + turn.output_tokens
        self._running[request_id] = (turn, self.now, False)
        self._scheduler.add(Sequence(request_id, turn.prompt, params, max_total_tokens=length))

    def _note(self, request_id: str, num_cached_tokens: int, is_end: bool) -> None:
        """Record a new token of a request, and let its agent continue after the last token."""
        turn, sent, has_started = self._running[request_id]
        agent = turn.agent
        if not has_started:
            self._running[request_id] = (turn, sent, True)
            seconds = self.now - sent
            if agent is None:
                self.outcome.single_first_token_s.append(seconds)
            elif agent.turns_left < self._traffic.turns - 1:
                self.outcome.first_token_s.append(seconds)
                self.outcome.num_prompt_tokens += len(turn.prompt)
                self.outcome.num_cached_tokens += num_cached_tokens
        if not is_end:
            return
        del self._running[request_id]
        if agent is not None:
            agent.note_answer(turn.output_tokens)
            self._continue(agent)

    def _continue(self, agent: Agent) -> None:
        """Plan the next turn of an agent after an answer."""
        if not agent.turns_left:
            self._num_agents -= 1
            return
        self._send_later(agent, agent.rng.expovariate(1 / self._traffic.pause_s))
        if agent.rng.random() < _BRANCH_SHARE:
            self._num_agents += 1
            self._send_later(agent.branch(next(self._branches)), 1.0)


def compare(traffic: Traffic, num_blocks: int, block_size: int, cost: Cost) -> dict[str, Outcome]:
    """Return the results of each policy for the same traffic."""
    return {
        policy: _simulation(traffic, policy, num_blocks, block_size, cost).run()
        for policy in POLICIES
    }


def _simulation(
    traffic: Traffic, policy: str, num_blocks: int, block_size: int, cost: Cost
) -> Simulation:
    """Return a simulation whose prefix cache uses the simulated time."""
    clock: list[Simulation] = []
    pool = BlockPool(num_blocks, clock=lambda: clock[0].now if clock else 0.0)
    scheduler = Scheduler(
        pool, block_size=block_size, max_num_seqs=256, max_num_batched_tokens=2048
    )
    clock.append(Simulation(traffic, policy, scheduler, cost))
    return clock[0]


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(2, 50_000), k=count)


def main(argv: abc.Sequence[str] | None = None) -> None:
    """Simulate the traffic of the command line with each policy, and print a table."""
    parser = command_line.parser(__doc__)
    add, usual = parser.add_argument, Traffic()
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
    names = ["policy", "hit rate", "first token p50", "p90", "p99"]
    others = ["other requests p50", "p90", "simulated s"]
    rows = [outcome.row(policy) for policy, outcome in outcomes.items()]
    sys.stdout.write(table([*names, *others], rows) + "\n")


if __name__ == "__main__":
    main()
