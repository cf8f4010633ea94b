"""A Llama in plain PyTorch, for training only; the names of its weights are those of Hugging Face's LlamaForCausalLM.

Owns the arithmetic of training. Promises that `state_dict()` of `Llama` can be saved as `model.safetensors` unchanged
(rotate-half rotary layout, grouped-query attention, a head of its own or the embedding's); `tests/lab/distill` compares
the logits with those of the serving runner.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names that config.json gives them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32
    vocab_size: int = 4096
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True

    def config(self) -> dict[str, object]:
        """config.json of LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, both [positions, head_dim], of the rotate-half layout."""
    frequency = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angle = torch.outer(torch.arange(shape.max_position_embeddings), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [batch, heads, positions, head_dim] by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    """LlamaAttention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything but the head; a class of its own because Hugging Face's names begin with `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape)


class Llama(nn.Module):
    """The model; its head is the embedding, or has weights of its own."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        if not shape.tie_word_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # each layer starts as the identity, which trains faster and never diverges

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, positions, vocab] of token ids [batch, positions]."""
        return self.logits(self.hidden(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab] of what `hidden` gave."""
        return F.linear(hidden, self.head)

    @property
    def head(self) -> Tensor:
        return self.model.embed_tokens.weight if self.shape.tie_word_embeddings else self.lm_head.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        """[batch, positions, hidden], normed, of token ids [batch, positions]."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats; with reduction `none`, [batch * positions]."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)


def initialise(module: nn.Module) -> None:
    """Normal weights: 0.02 for the embedding, which is also the head, and fan-in scaled for the matrices."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)


def parameter_count(model: nn.Module) -> int:
    """Learnt numbers; the tied head is counted once."""
    return sum(weight.numel() for weight in model.parameters())
