"""compressed-tensors itself as the oracle: what it writes, we read as it reads it back."""

from types import SimpleNamespace

import pytest
import torch
from fp8_layouts import FLOAT_GROUPS, FLOAT_TOKENS, compressed_fp8, draw_floats
from safetensors.torch import save_file
from test_stored_formats import TOKENS, compressed, meaning, recipe_of

from splittime.kernels.reference.rounding import dequantize
from splittime.models.weights.checkpoint import Checkpoint

CASES = {
    "w4a16 in groups": compressed("pack-quantized", 4, 32),
    "w4a16 a row": compressed("pack-quantized", 4),
    "w4a16 asymmetric": compressed("pack-quantized", 4, 32, symmetric=False),
    "w4a16 asymmetric a row": compressed("pack-quantized", 4, symmetric=False),
    "w8a16 in groups": compressed("pack-quantized", 8, 32),
    "w8a8": compressed("int-quantized", 8, activations=TOKENS),
    "w8a8 asymmetric": compressed("int-quantized", 8, symmetric=False, activations=TOKENS),
}


@pytest.fixture(scope="module")
def library() -> SimpleNamespace:
    """What is used of it: its import takes three seconds."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import compressors, quantization

    return SimpleNamespace(
        compressor=compressors.BaseCompressor.get_value_from_registry,
        arguments=quantization.QuantizationArgs,
        scheme=quantization.QuantizationScheme,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(24, 64), (19, 96)], ids=str)
def test_we_read_what_the_library_wrote(library, tmp_path, name, shape):
    config = CASES[name]
    (group,) = config["config_groups"].values()
    arguments = library.arguments(**group["weights"])
    activations = group["input_activations"]
    scheme = library.scheme(
        targets=["Linear"], weights=arguments, input_activations=activations and library.arguments(**activations)
    )
    source = torch.Generator().manual_seed(3)
    groups = shape[1] // 32 if arguments.group_size else 1
    half = 1 << (arguments.num_bits - 1)
    state = {
        "weight": torch.randn(shape, generator=source),
        "weight_scale": torch.rand(shape[0], groups, generator=source) / half + 0.5 / half,
    }
    if not arguments.symmetric:
        points = torch.randint(-half, half, (shape[0], groups), generator=source)
        state["weight_zero_point"] = points.to(torch.int8)
    compressor = library.compressor(config["format"])
    written = compressor.compress(state, scheme)
    read = compressor.decompress(written, scheme)["weight"]
    save_file({f"m.{key}": tensor.contiguous() for key, tensor in written.items()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, recipe_of(config))
    values = meaning(checkpoint.take_linear("m", *shape), 16)
    assert checkpoint.not_taken() == []
    torch.testing.assert_close(values, read.double(), rtol=3e-7, atol=1.2e-7)  # float32 products, its and ours
    assert len(values.unique()) > half


@pytest.mark.parametrize("name", ["tensor", "channel", "block"])
def test_we_read_the_fp8_that_the_library_wrote(library, tmp_path, name):
    config = compressed_fp8(name, FLOAT_GROUPS if name == "block" else FLOAT_TOKENS)
    (group,) = config["config_groups"].values()
    arguments, activations = library.arguments(**group["weights"]), library.arguments(**group["input_activations"])
    scheme = library.scheme(targets=["Linear"], weights=arguments, input_activations=activations)
    out, columns = 256, 384
    drawn = draw_floats(out, columns, name, dtype=torch.float32)
    state = {"weight": torch.randn(out, columns, generator=torch.Generator().manual_seed(3)) / columns**0.5}
    state["weight_scale"] = drawn.s.reshape(-1) if name == "tensor" else drawn.s
    compressor = library.compressor(config["format"])
    written = compressor.compress(state, scheme)
    read = compressor.decompress(written, scheme)["weight"]
    save_file({f"m.{key}": tensor.contiguous() for key, tensor in written.items()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, recipe_of(config))
    weight = checkpoint.take_linear("m", out, columns)
    rows = weight.rows(0, out)
    assert checkpoint.not_taken() == []
    values = dequantize(rows.integers, rows.scales, weight.scheme)
    torch.testing.assert_close(values, read.float(), rtol=3e-7, atol=1e-9)
    assert len(values.unique()) > 100
