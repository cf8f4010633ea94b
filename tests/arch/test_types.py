"""`Any` stands nowhere between models, kernels and runner: mypy checks both sides of those seams.

Within models it may stand in the readers of strangers' files, whose values have no type before they are looked at.
"""

import ast

import pytest
from test_imports import SOURCE

SEAMS = ["kernels", "models", "runner/device", "runner/kv_store.py", "runner/load.py"]
READERS = {
    "models/config.py",
    "models/encoder_config.py",
    "models/fields.py",
    "models/parts.py",
    "models/gguf/config.py",
    "models/gguf/cursor.py",
    "models/gguf/file.py",
    "models/weights/checkpoint.py",
    "models/weights/shard_files.py",
    *(f"models/weights/formats/{name}.py" for name in ("awq", "compressed", "floats", "fp8", "gptq", "mxfp4")),
    *(f"models/weights/formats/{name}.py" for name in ("read", "recipe")),
}


def seam_files():
    for seam in SEAMS:
        found = SOURCE / seam
        yield from sorted(found.rglob("*.py")) if found.is_dir() else [found]


def uses_of_any(source):
    """The lines with an `Any`."""
    nodes = ast.walk(ast.parse(source))
    named = (node for node in nodes if getattr(node, "id", getattr(node, "attr", None)) == "Any")
    return [node.lineno for node in named]


@pytest.mark.parametrize("path", list(seam_files()), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_any_at_a_seam(path):
    is_reader = str(path.relative_to(SOURCE)) in READERS
    assert bool(uses_of_any(path.read_text(encoding="utf-8"))) is is_reader


def test_a_use_is_found():
    assert uses_of_any("import typing\ndef f(x: dict[str, typing.Any]) -> Any: ...") == [2, 2]
