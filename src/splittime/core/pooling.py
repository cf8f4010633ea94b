"""How an embedding is made of what a model computes, as the model's own files say; and one made so."""

import msgspec

NO_FILE = "no file of the model says how its outputs become an embedding: the last token's, normalised"
NO_FILE_OF_ENCODER = NO_FILE.replace("last", "first")
LEAST_LENGTH = 1e-12  # a shorter vector is divided by this


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """kind: one of `sampling.POOLINGS`. is_normalised: an embedding has the length 1.

    named_by: the file, or the key of a GGUF file, that says so; "" where none does. Such a model was not made for
        embeddings; it makes them as decoders do that were.
    size: how many values an embedding has; 0 where nobody knows. sizes: to which it may be cut; () is any.
    refusal: why it makes none, in words; "" if it does.
    is_all: the model is an encoder, and generates nothing. score: it judges pairs of texts by a head, and what becomes
        of that: "sigmoid", or "none" if nothing; "" where it has no such head.
    """

    kind: str = "last"
    is_normalised: bool = True
    named_by: str = ""
    size: int = 0
    sizes: tuple[int, ...] = ()
    may_be_cut: bool = True
    refusal: str = ""
    is_all: bool = False
    score: str = ""
