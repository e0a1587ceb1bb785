# SPDX-License-Identifier: Apache-2.0
"""Chooses the number of draft tokens for each sequence and step.

Each draft token costs time, but only an accepted draft token saves time. Let p be the probability
that a draft token is accepted if all draft tokens before it are accepted. The draft token number n
is then accepted with the probability p ** n. An accepted token saves the time that a step without
drafts needs for one sequence. A draft should therefore contain the token number n only if p ** n is
larger than the cost ratio:

    cost ratio = additional time for one draft token / (time of a step without drafts / sequences)

The probability p and the cost ratio are measured. A step with one sequence mostly reads the weights
of the model, so the cost ratio is small. In a step with many sequences, the cost ratio can exceed
1. Drafts are then turned off.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from nereid_backend.core.sequence import Sequence

# The assumed probability that a draft token is accepted, before the first draft is verified.
_FIRST_RATE = 0.8
# The acceptance rate of a new sequence starts at the rate of all sequences so far. This initial
# rate counts as much as a measurement with this number of draft tokens.
_FIRST_WEIGHT = 3.0
# Factors by which the old counts are multiplied before a new draft is counted, so that old drafts
# gradually lose their weight. The first factor is for the counts of one sequence, the second one
# for the counts of all sequences together.
_DECAY, _OVERALL_DECAY = 0.9, 0.99
# If drafts cost more time than they save, the sequence gets no drafts for 32 steps. After this
# pause, a draft of one token is tried. Each further pause is twice as long, up to 1024 steps.
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
# The assumed cost ratio before the first measurements, and the range to which measured ratios are
# limited.
_FIRST_RATIO = 0.25
_MIN_RATIO, _MAX_RATIO = 0.02, 4.0
# Each measured value is the median of the most recent measurements, at most this number of them.
_NUM_MEASUREMENTS = 9
# With fewer measurements than this, the assumed cost ratio is used, because the first steps with
# drafts can be slow.
_MIN_MEASUREMENTS = 3
# A step without drafts is measured after this number of steps with drafts. The first number is used
# before the first such measurement, the second number before each further one.
_MEASURE_AFTER = 8
_MEASURE_EVERY = 64


@dataclass(slots=True)
class _Rate:
    """The share of draft tokens that were accepted. New drafts have more weight than old drafts.

    Attributes:
        accepted: the weighted number of accepted draft tokens.
        verified: the weighted number of verified draft tokens. They are the accepted draft tokens
            and the first rejected draft token of each draft. The tokens after the first rejected
            token do not count, because they were not tested.
    """

    accepted: float
    verified: float

    @property
    def value(self) -> float:
        """The probability with which the next draft token is accepted."""
        return self.accepted / self.verified

    def add(self, num_proposed: int, num_accepted: int, decay: float) -> None:
        """Add a draft of `num_proposed` tokens, of which the first `num_accepted` are accepted."""
        self.accepted = self.accepted * decay + num_accepted
        self.verified = self.verified * decay + min(num_accepted + 1, num_proposed)


@dataclass(slots=True)
class _History:
    """The acceptance rate of one sequence's drafts, and the pauses between its drafts.

    Attributes:
        rate: the share of accepted draft tokens.
        pause: the number of steps in which the sequence gets no draft.
        next_pause: the number of steps of the next pause.
    """

    rate: _Rate
    pause: int = 0
    next_pause: int = _FIRST_PAUSE


@dataclass(slots=True)
class _Measured:
    """The measured times of steps with about the same number of sequences.

    Attributes:
        plain: the seconds for each sequence in steps without drafts.
        ratios: the cost ratios of steps with drafts.
        drafting: the seconds that a draft model took for each draft token.
        num_since_plain: the number of steps with drafts since the last step without drafts.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_MEASUREMENTS))
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_MEASUREMENTS))
    drafting: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_MEASUREMENTS))
    num_since_plain: int = 0


class StepCosts:
    """The measured cost of draft tokens, by the number of sequences in a step."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def add_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Record the duration of a step.

        The step has computed one known token of each sequence, and `num_drafts` draft tokens.
        """
        measured = self._of(num_sequences)
        if num_drafts == 0:
            measured.plain.append(seconds / num_sequences)
            measured.num_since_plain = 0
            return
        measured.num_since_plain += 1
        if measured.plain:
            plain = statistics.median(measured.plain)
            additional = seconds - plain * num_sequences
            measured.ratios.append(additional / num_drafts / plain)

    def add_drafting(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Add the time in which a draft model generated `num_drafts` tokens for a step."""
        self._of(num_sequences).drafting.append(seconds / num_drafts)

    def ratio(self, num_sequences: int) -> float:
        """Return the cost ratio of a draft token in a step with this number of sequences."""
        measured = self._of(num_sequences)
        is_known = len(measured.ratios) >= _MIN_MEASUREMENTS
        ratio = statistics.median(measured.ratios) if is_known else _FIRST_RATIO
        ratio = min(_MAX_RATIO, max(_MIN_RATIO, ratio))
        if measured.plain and measured.drafting:
            ratio += statistics.median(measured.drafting) / statistics.median(measured.plain)
        return ratio

    def needs_plain_step(self, num_sequences: int) -> bool:
        """Return whether to run the next step without drafts, so that such a step is measured."""
        measured = self._of(num_sequences)
        period = _MEASURE_EVERY if measured.plain else _MEASURE_AFTER
        return measured.num_since_plain >= period

    def _of(self, num_sequences: int) -> _Measured:
        """Return the measurements for steps with about this number of sequences.

        From 16 on, neighbouring numbers share their measurements. Example: 16 and 17 share theirs,
        and so do the numbers from 64 to 71.
        """
        shift = max(0, num_sequences.bit_length() - 4)
        return self._measured.setdefault(num_sequences >> shift << shift, _Measured())


class DraftLengths:
    """Chooses the lengths of drafts from their measured acceptance and cost.

    Attributes:
        max_tokens: the largest number of draft tokens for one sequence in one step.
        costs: the measured cost of draft tokens.
        num_drafts: the number of drafts that were verified.
        num_proposed: the number of draft tokens that were verified.
        num_accepted: the number of draft tokens that were accepted.
    """

    def __init__(self, max_tokens: int) -> None:
        """Create an object without sequences."""
        self.max_tokens = max_tokens
        self.costs = StepCosts()
        self.num_drafts = 0
        self.num_proposed = 0
        self.num_accepted = 0
        self._histories: dict[Sequence, _History] = {}
        self._overall = _Rate(_FIRST_RATE * _FIRST_WEIGHT, _FIRST_WEIGHT)
        self._ratio = _FIRST_RATIO
        self._is_plain_step = False

    def begin_step(self, num_sequences: int) -> None:
        """Set the approximate number of sequences of the next step.

        The cost of a draft token depends on this number.
        """
        if num_sequences > 0:
            self._ratio = self.costs.ratio(num_sequences)
            self._is_plain_step = self.costs.needs_plain_step(num_sequences)

    def next_length(self, sequence: Sequence) -> int:
        """Return the largest number of draft tokens for a sequence in the next step.

        The result is the largest n for which p ** n is above the cost ratio, where p is the rate of
        accepted draft tokens; see the module's docstring.

        Call this method once for each step of the sequence, because each call shortens a pause by
        one step.

        Example: max_tokens is 4, the cost ratio is 0.25, and 60 % of the sequence's draft tokens
        were accepted. The result is 2, because 0.6 ** 2 is above 0.25, but 0.6 ** 3 is below.
        """
        history = self._histories.get(sequence)
        if history is None:
            rate = self._overall.value
            history = _History(_Rate(rate * _FIRST_WEIGHT, _FIRST_WEIGHT))
            self._histories[sequence] = history
        if history.pause > 0:
            history.pause -= 1
            return 0
        if self._is_plain_step:
            return 0
        rate = history.rate.value
        if rate <= self._ratio:
            # The pause is over, or this is the first draft of the sequence.
            return min(1, self.max_tokens)
        if rate >= 1:
            return self.max_tokens
        return min(self.max_tokens, math.ceil(math.log(self._ratio) / math.log(rate)) - 1)

    def learn(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Record how many of the draft tokens of a sequence were accepted in a step."""
        self.num_drafts += 1
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self._overall.add(num_proposed, num_accepted, _OVERALL_DECAY)
        history = self._histories.get(sequence)
        if history is None:
            return
        history.rate.add(num_proposed, num_accepted, _DECAY)
        if history.rate.value > self._ratio:
            history.next_pause = _FIRST_PAUSE
            return
        history.pause = history.next_pause
        history.next_pause = min(2 * history.next_pause, _LONGEST_PAUSE)

    def forget(self, sequence: Sequence) -> None:
        """Delete the history of an ended sequence."""
        self._histories.pop(sequence, None)
