"""Bodies of 4 MB that may cost whoever reads them much more than their length: by what stands in a text, and by what a
body is made of."""

import json

BYTES = 4 * 2**20 - 1024


def dumped(body: dict, **how) -> bytes:
    return json.dumps(body, **how).encode()


TEXTS = {  # each as it stands in the body, and how often
    "plain": ("x", BYTES),
    "quotes and brackets": ('\\"[', BYTES // 3),
    "opening brackets": ("[{", BYTES // 2),
    "escapes": ("\\\\\\n", BYTES // 4),
    "half characters": ("\\ud83d\\ude00", BYTES // 12),
    "long characters": ("é€😀\\t", BYTES // 11),
}


WORST = ("quotes and brackets", "escapes", "many fields", "many numbers", "slow numbers", "deep", "quotes alone")


def hostile_bodies(body_of, *, only_worst: bool = False) -> dict[str, bytes]:
    """Returns bodies by what is hostile in them. body_of: makes a route's body of a text. only_worst: some of each
    kind, for a route that reads its body as others do."""
    plain = body_of("TEXT")
    around = dumped(plain).split(b"TEXT")
    told = dumped(plain)[:-1]
    made = {name: (piece * count).encode().join(around) for name, (piece, count) in TEXTS.items()}
    made |= {
        "many fields": dumped(plain | {"user": {str(n): n for n in range(32_000)}}),
        "more fields than may be": dumped(plain | {"logit_bias": {str(n): 0 for n in range(250_000)}}),
        "many floats": dumped(plain | {"stop": [1.5] * 65_000}),
        "many stop strings": dumped(plain | {"stop": ["a"] * 80_000}),
        "many biases": dumped(plain | {"logit_bias": {str(n): 0 for n in range(32_000)}}),
        "many tools": dumped(plain | {"tools": [{"type": "function", "function": {"name": "f"}}] * 5_000}),
        "many numbers": told + b', "user": [' + b"1," * 1_000_000 + b"1]}",
        "too many numbers": told + b', "user": [' + b"1," * (BYTES // 2 - 99) + b"1]}",
        "slow numbers": told + b', "chat_template_kwargs": {"a": [' + b"1e-310," * (BYTES // 7 - 99) + b"1]}}",
        "a long label": told + b', "user": "' + b"\\n" * (BYTES // 2 - 99) + b'"}',
        "a long number": told + b', "user": ' + b"1" * (BYTES - 99) + b"}",
        "deep": told + b', "user": ' + b"[" * (BYTES // 2 - 99) + b"]" * (BYTES // 2 - 99) + b"}",
        "as deep as may be": told + b', "user": [' + b",".join([b"[" * 400 + b"]" * 400] * 40) + b"]}",
        "many small objects": told + b', "user": [' + b"{}," * 16_000 + b"{}]}",
        "space": told + b" " * (BYTES - 99) + b"}",
        "quotes alone": b'"' * BYTES,
        "brackets alone": b"[" * BYTES,
        "no text": b"\xff" * BYTES,
    }
    return {name: made[name] for name in WORST} if only_worst else made
