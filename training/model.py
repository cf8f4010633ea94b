"""The shapes of the packaged models; the arithmetic is `splittime.lab.distill.llama`'s.

`python -m training.evaluate --check-transformers` compares the logits with transformers.
"""

from splittime.lab.distill.llama import Shape

SHAPES = {
    "code": Shape(256, 704, 4, 8, 4),
    "code-draft": Shape(128, 352, 4, 4, 2),
}
