"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopChecker:
    """Watches one answer's text for stop strings and says what of it may be shown.

    The stop string that is complete first ends the answer (of several complete at the same character, the longest), so
    the outcome does not depend on how the text was cut into pieces. Text that may still become a stop string is held
    back, so nothing shown has to be taken back.

    Args:
        stops: the stop strings, none of them empty.
        include: whether the stop string that ended the answer is part of its text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        #: The stop string that ended the answer.
        self.matched: str | None = None

    def push(self, text: str, enabled: bool = True) -> str:
        """Take the next piece; returns the text to show now. Nothing follows once `matched` is set.

        With enabled=False (before `min_tokens`) stop strings that are complete within the text so far do not count.
        """
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        if enabled:
            ends = []
            for stop in self._stops:
                start = text.find(stop, max(0, held - len(stop) + 1))
                if start >= 0:
                    ends.append((start + len(stop), start, stop))
            if ends:
                end, start, self.matched = min(ends)
                self._held = ""
                return text[: end if self._include else start]
        shown = len(text) - self._possible_start(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, once no more can come."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
