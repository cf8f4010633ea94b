"""For a test that a machine at a standstill can spoil, and that a defect spoils each time."""

import contextlib
import functools
from collections.abc import Callable


def holds_once_in(times: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test passes if one of so many runs of it does; the last one's failure is shown."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def repeated(*args: object, **kwargs: object) -> None:
            for _ in range(times - 1):
                with contextlib.suppress(AssertionError):
                    return test(*args, **kwargs)
            return test(*args, **kwargs)

        return repeated

    return decorate
