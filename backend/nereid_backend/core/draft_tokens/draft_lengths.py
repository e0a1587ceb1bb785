# SPDX-License-Identifier: Apache-2.0
"""Chooses the number of draft tokens for each sequence and step.

Each draft token costs time, but only an accepted draft token saves time. Let p be the probability
that a draft token is accepted if all draft tokens before it are accepted. Draft token number n is
then accepted with the probability p ** n. An accepted token saves the time that a step without
drafts needs for one sequence. A draft should therefore contain token number n only if p ** n is
larger than the cost ratio:

    cost ratio = additional time for one draft token / (time of a step without drafts / sequences)

The probability p and the cost ratio are measured. A step with one sequence spends most of its time
on reading the weights of the model, so the cost ratio is small. In a step with many sequences, the
cost ratio can exceed 1. Drafts are then turned off.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from nereid_backend.core.sequence import Sequence

# Before the first draft is verified, this value is assumed to be the probability that a draft token
# is accepted.
_FIRST_RATE = 0.8
# A new sequence starts with the acceptance rate of all sequences so far. This initial rate has the
# same weight as _FIRST_WEIGHT verified draft tokens.
_FIRST_WEIGHT = 3.0
# Before a new draft is counted, the old counts are multiplied by these factors, so that old drafts
# gradually lose their weight. The first factor applies to the counts of one sequence. The second
# factor applies to the counts of all sequences together.
_DECAY, _OVERALL_DECAY = 0.9, 0.99
# A sequence whose drafts cost more time than they save gets no drafts for 32 steps. After this
# pause, a draft of one token is tried. Each further pause is twice as long, up to 1024 steps.
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
# Before the first measurements, this value is assumed to be the cost ratio: the cost of a draft
# token, divided by the cost of one sequence in a step without drafts.
_FIRST_RATIO = 0.25
# If the cost ratio is outside this range, the nearest limit of the range is used instead.
_MIN_RATIO, _MAX_RATIO = 0.02, 4.0
# The largest number of recent measurements from which a median is computed.
_NUM_MEASUREMENTS = 9
# The smallest number of measurements from which a cost ratio is computed. If there are fewer
# measurements, the assumed cost ratio is used, because the first steps with drafts can be slow.
_MIN_MEASUREMENTS = 3
# After the first `_MEASURE_AFTER` steps with drafts, one step runs without drafts, and its time is
# measured. Later, such a step runs after every `_MEASURE_EVERY` steps with drafts.
_MEASURE_AFTER = 8
_MEASURE_EVERY = 64


@dataclass(slots=True)
class _Rate:
    """The fraction of draft tokens that were accepted. New drafts have more weight than old ones.

    Attributes:
        accepted: the weighted number of accepted draft tokens.
        verified: the weighted number of verified draft tokens. The accepted tokens of a draft count
            as verified, and so does its first rejected token. The tokens after the first rejected
            token do not count, because they were not tested.
    """

    accepted: float
    verified: float

    @property
    def value(self) -> float:
        """The estimated probability that the next draft token is accepted."""
        return self.accepted / self.verified

    def add(self, num_proposed: int, num_accepted: int, decay: float) -> None:
        """Add a draft of `num_proposed` tokens. The first `num_accepted` tokens were accepted."""
        self.accepted = self.accepted * decay + num_accepted
        self.verified = self.verified * decay + min(num_accepted + 1, num_proposed)


@dataclass(slots=True)
class _History:
    """The acceptance rate of one sequence's drafts, and the pauses in which no drafts are made.

    Attributes:
        rate: the share of accepted draft tokens.
        num_paused_steps: the number of remaining steps in which the sequence gets no draft.
        next_pause: the length of the next pause in steps.
    """

    rate: _Rate
    num_paused_steps: int = 0
    next_pause: int = _FIRST_PAUSE

    def start_pause(self) -> None:
        """Pause the drafts for `next_pause` steps, and double `next_pause` up to a limit."""
        self.num_paused_steps = self.next_pause
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)


@dataclass(slots=True)
class _StepTimes:
    """The measured times of steps with about the same number of sequences.

    Attributes:
        plain_s: for each measured step without drafts (a plain step), its duration in seconds
            divided by its number of sequences.
        cost_ratios: for each measured step with drafts, its cost ratio.
        drafting_s: for each measured step, the seconds in which a draft model generated one token.
        num_steps_since_plain: the number of steps with drafts since the last plain step.
    """

    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_MEASUREMENTS))
    cost_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_MEASUREMENTS))
    drafting_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_MEASUREMENTS))
    num_steps_since_plain: int = 0


class StepCosts:
    """Measures the cost of draft tokens. The cost depends on the number of sequences in a step."""

    def __init__(self) -> None:
        self._measured: dict[int, _StepTimes] = {}

    def add_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record the duration of a step, from which the cost ratio of draft tokens is computed.

        The cost ratio is the additional time for one draft token, divided by the time that a step
        without drafts needs for one sequence.

        Example: a step with 4 sequences takes 20 ms without drafts, which is 5 ms for one sequence.
        With 4 draft tokens, the step takes 24 ms, so each draft token takes 1 ms. The cost ratio is
        1 / 5 = 0.2.

        Args:
            num_sequences: the number of sequences in the step. The model computed one known token
                for each sequence.
            num_drafts: the number of draft tokens of all sequences together.
            seconds: the duration of the step.
        """
        times = self._times_of(num_sequences)
        if num_drafts == 0:
            times.plain_s.append(seconds / num_sequences)
            times.num_steps_since_plain = 0
            return
        times.num_steps_since_plain += 1
        if times.plain_s:
            # A step without drafts has already been measured.
            plain_s_per_sequence = statistics.median(times.plain_s)
            additional_s = seconds - plain_s_per_sequence * num_sequences
            times.cost_ratios.append(additional_s / num_drafts / plain_s_per_sequence)

    def add_drafting(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record that a draft model took `seconds` seconds to generate `num_drafts` tokens."""
        self._times_of(num_sequences).drafting_s.append(seconds / num_drafts)

    def ratio(self, num_sequences: int) -> float:
        """Return the cost of a draft token as a multiple of the cost of one sequence in a step."""
        times = self._times_of(num_sequences)
        is_known = len(times.cost_ratios) >= _MIN_MEASUREMENTS
        ratio = statistics.median(times.cost_ratios) if is_known else _FIRST_RATIO
        ratio = min(_MAX_RATIO, max(_MIN_RATIO, ratio))
        if times.plain_s and times.drafting_s:
            ratio += statistics.median(times.drafting_s) / statistics.median(times.plain_s)
        return ratio

    def needs_plain_step(self, num_sequences: int) -> bool:
        """Return whether it is time to measure a step without drafts."""
        times = self._times_of(num_sequences)
        period = _MEASURE_EVERY if times.plain_s else _MEASURE_AFTER
        return times.num_steps_since_plain >= period

    def _times_of(self, num_sequences: int) -> _StepTimes:
        """Return the measurements for steps with about `num_sequences` sequences.

        If a step has at least 16 sequences, steps with slightly different numbers of sequences
        share measurements. Example: steps with 16 or 17 sequences share one list of measurements,
        and steps with 64 to 71 sequences share another list.
        """
        shift = max(0, num_sequences.bit_length() - 4)
        return self._measured.setdefault(num_sequences >> shift << shift, _StepTimes())


class DraftLengths:
    """Chooses the lengths of drafts, based on measured acceptance rates and costs.

    Attributes:
        max_tokens: the largest number of draft tokens for one sequence in one step.
        costs: the measured cost of draft tokens.
        num_drafts: the number of drafts that were verified.
        num_proposed: the number of draft tokens that were verified.
        num_accepted: the number of draft tokens that were accepted.
    """

    def __init__(self, max_tokens: int) -> None:
        """Create an object without measurements.

        Args:
            max_tokens: the largest number of draft tokens for one sequence in one step; at least 1.
        """
        self.max_tokens = max_tokens
        self.costs = StepCosts()
        self.num_drafts = 0
        self.num_proposed = 0
        self.num_accepted = 0
        self._histories: dict[Sequence, _History] = {}
        # The acceptance rate of all sequences together. Its first value is _FIRST_RATE. This value
        # has the same weight as _FIRST_WEIGHT verified draft tokens.
        self._overall_rate = _Rate(_FIRST_RATE * _FIRST_WEIGHT, _FIRST_WEIGHT)
        # `begin_step` sets the following two attributes. The cost ratio is the time of a draft
        # token, divided by the time that an accepted draft token saves.
        self._cost_ratio = _FIRST_RATIO
        # Whether the next step must run without draft tokens, so that its time can be measured.
        self._is_plain_step_due = False

    def begin_step(self, num_sequences: int) -> None:
        """Prepare for the next step, which computes about `num_sequences` sequences.

        The cost of a draft token depends on this number.
        """
        if num_sequences > 0:
            self._cost_ratio = self.costs.ratio(num_sequences)
            self._is_plain_step_due = self.costs.needs_plain_step(num_sequences)

    def take_length(self, sequence: Sequence) -> int:
        """Return the largest number of draft tokens for a sequence in the next step.

        The length is 0 in a pause, which `record_draft` starts when drafts cost more time than they
        save. The length is also 0 if the next step must measure the time of a step without drafts.
        Otherwise, the length is at least 1.

        Mutates: a pause becomes one step shorter. Therefore, call this method once for each step of
            the sequence.
        """
        history = self._history_of(sequence)
        if history.num_paused_steps > 0:
            history.num_paused_steps -= 1
            return 0
        if self._is_plain_step_due:
            return 0
        profitable = _profitable_length(history.rate.value, self._cost_ratio, self.max_tokens)
        # After a pause, a draft of one token measures the acceptance rate again.
        return max(1, profitable)

    def _history_of(self, sequence: Sequence) -> _History:
        """Return the record of a sequence's drafts. If no record exists, create and store one."""
        history = self._histories.get(sequence)
        if history is None:
            num_accepted = self._overall_rate.value * _FIRST_WEIGHT
            history = _History(_Rate(num_accepted, _FIRST_WEIGHT))
            self._histories[sequence] = history
        return history

    def record_draft(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Record that `num_accepted` of `num_proposed` draft tokens of a sequence were accepted.

        If the acceptance rate of the sequence is now too low to save time, a pause begins. During
        the pause, the sequence gets no drafts. Each further pause is twice as long, up to a limit.

        Mutates: the counters, the acceptance rate of all sequences, and the history of the
            sequence.
        """
        self.num_drafts += 1
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self._overall_rate.add(num_proposed, num_accepted, _OVERALL_DECAY)
        history = self._histories.get(sequence)
        if history is None:
            return  # The sequence has ended.
        history.rate.add(num_proposed, num_accepted, _DECAY)
        drafts_save_time = history.rate.value > self._cost_ratio
        if drafts_save_time:
            # A later pause must be short again.
            history.next_pause = _FIRST_PAUSE
        else:
            history.start_pause()

    def forget(self, sequence: Sequence) -> None:
        """Delete the history of an ended sequence."""
        self._histories.pop(sequence, None)


def _profitable_length(acceptance_rate: float, cost_ratio: float, max_tokens: int) -> int:
    """Return the largest number of draft tokens, at most `max_tokens`, that save time on average.

    Let p be the acceptance rate. Draft token number n is accepted with the probability p ** n,
    because all tokens before it must be accepted, too. It saves time if p ** n is above the cost
    ratio.

    Example: max_tokens is 4, the cost ratio is 0.25, and p is 0.6. The result is 2, because 0.36
    (the square of 0.6) is above 0.25, but 0.216 (the cube of 0.6) is below.
    """
    if acceptance_rate <= cost_ratio:
        return 0
    if acceptance_rate >= 1:
        return max_tokens
    # p ** break_even_length equals the cost ratio, which is always positive.
    break_even_length = math.log(cost_ratio) / math.log(acceptance_rate)
    return min(max_tokens, math.ceil(break_even_length) - 1)
