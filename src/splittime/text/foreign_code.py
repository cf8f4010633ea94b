"""What a model's author wrote runs here too: regular expressions of its tokenizer, its chat template.

When such a program fails, the request that ran it is told, and nobody else. `tokenizers` is written in Rust: a fault in
there arrives as `pyo3_runtime.PanicException`, which is a `BaseException`, so that `except Exception` does not see it.
Interrupts, exits and cancellations are somebody else's and go on.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from splittime.core.errors import EngineError, RequestError, SplittimeError


def is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def tokenizer_faults() -> Iterator[None]:
    """Raises `EngineError` for whatever goes wrong inside: the text was one, so the fault is the tokenizer's."""
    try:
        yield
    except SplittimeError:
        raise
    except MemoryError:
        raise too_costly() from None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        said = f"the model's tokenizer failed: {str(error)[:200]}"
        raise EngineError(
            said, code="tokenizer_failed", hint="another text may do; the model's files are at fault"
        ) from error


def too_costly(limits: str = "the memory that there is") -> RequestError:
    """It may be the text, or what the model's author does with it; to send it again would not help."""
    return RequestError(
        f"to make tokens of this prompt takes more than {limits}",
        code="prompt_too_costly",
        param="prompt",
        hint="send a shorter one, or token ids",
    )
