"""When a request's text is searched: in the step after one that found a draft to tell, else after pauses that double.

A search takes microseconds, and a step of a small model only some hundred of them. Pauses end where the step's number
is a multiple of their length, so that requests which are seldom asked are asked in the same steps, and most steps have
none to ask.
"""

LONGEST_PAUSE = 16  # steps; a power of two


class SearchPace:
    """next_step: when the request is to be searched again. num_steps: from one search to the one before, at most
    `LONGEST_PAUSE`."""

    __slots__ = ("_last", "_pause", "next_step", "num_steps")

    def __init__(self) -> None:
        self._last = self.next_step = self.num_steps = 0
        self._pause = 1

    def searched(self, step: int) -> None:
        """Takes in a search, due or not, that came to nothing unless `succeed` follows."""
        self.num_steps, self._last = min(step - self._last, LONGEST_PAUSE), step
        if step >= self.next_step:
            self.next_step = (step // self._pause + 1) * self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def succeed(self) -> None:
        """Takes in that the search came to something."""
        self.next_step, self._pause = 0, 1
