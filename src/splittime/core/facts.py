"""What both columns know of a machine and a model: the runner measures and counts it, the ledger's facts hold it.

What follows from it (a step's floor, a share of the roofline) is an estimate, made in `diagnose` and stored nowhere.

How an embedding is made of what a model computes, as the model's own files say; and one made so.
"""

import msgspec

PREFILL_SLICE_NS = 250_000_000
"""How long a step may compute prompts while others wait for their next token, unless `max_prefill_tokens` is set: steps
are made so long at a start, and only longer ones are an illness (`diagnose.rules.prefill`). Products are as fast
for some dozens of tokens as for thousands, but what a step takes beside them is paid each time: steps of 40 ms took a
135M model's median first token from 4.6 to 11.2 s at the same load."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings, measured by short loops on this machine with the server's own number of threads.

    read_rates: (bytes, bytes a second), by rising size: what so many bytes are read at when they are read over and
        over, as a step reads weights and keys; small ones come from a cache, the largest from memory. No size of a
        cache that the machine reports is believed: of a virtual one it may be another's.
    read_bytes_per_s: that of the largest.
    operations_per_s: of the product that the weights use, by the server's own kernels, where a multiplication and its
        addition are two; None if it could not be measured, or not yet.
    peak_operations_per_s: of the fastest instructions that the processor has for such numbers, whoever uses them; None
        too where nothing measures it (a card, no native kernels, books of an earlier version).
    cache_bytes: the processor's last-level cache as the machine reports it, for information. cores: whole ones that
        the process may use. quota: cores' worth of time that its control groups give it; None for no bound.
    measured_at_unix_ns: when, which may be some days before the start: ceilings are kept between starts.
    """

    cpu: str
    threads: int
    read_rates: tuple[tuple[int, float], ...] = ()
    read_bytes_per_s: float | None = None
    operations_per_s: float | None = None
    peak_operations_per_s: float | None = None
    measured_at_unix_ns: int | None = None
    cache_bytes: int | None = None
    cores: int | None = None
    quota: float | None = None


class RefusedValues(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Values of a setting that a server would not start with, the rest of its settings being as they are, and why: what
    begins with `value`, or numbers below `least` or above `most`."""

    name: str
    why: str
    value: str | None = None
    least: int | None = None
    most: int | None = None

    def has(self, name: str, value: object) -> bool:
        """Returns whether it refuses this value of this setting."""
        if name != self.name:
            return False
        if self.value is not None:
            return str(value).replace(" ", "").startswith(self.value)
        return isinstance(value, int | float) and not (self.least or value) <= value <= (self.most or value)


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's shape makes a step need, at the least; where ranks share the model, of the first one.

    weight_bytes: read by a step in which a row samples, the packed weights as they lie in memory; of a mixture of
        experts only those that one token chooses; idle_expert_bytes: the other experts'. head_bytes: of these the
        head's, which a step without a sampling row leaves alone.
    kv_bytes_per_token: read for each token of context that a row attends to, and written for each new one.
    state_bytes: read and written for each row, of layers that keep a state of each sequence.
    operations_per_token: of the layers' products, for each token computed; a multiplication and its addition are two.
    operations_per_sample: of the head's product, for each row that samples.
    operations_per_context_token: of attention, for each pair of a computed token and one that it attends to.
    num_experts, chosen_experts: of a layer of a mixture, in all and for one token; 0 of a model that is none.
    window_tokens, windowed_share: a sliding window, and the share of layers that have it.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    operations_per_token: int
    operations_per_context_token: int
    head_bytes: int = 0
    operations_per_sample: int = 0
    window_tokens: int | None = None
    windowed_share: float = 0.0
    idle_expert_bytes: int = 0
    num_experts: int = 0
    chosen_experts: int = 0
    state_bytes: int = 0


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
