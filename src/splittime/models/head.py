"""A head that predicts further tokens from what the model has computed: one more layer behind the model's last.

    features   of the token before: the model's last hidden state, normed, or what the head itself made of a draft
    x          joined(norm(features), norm(embedding of the token))
    hidden     layer(x), of which the model's own head makes the logits of the next token

It is the multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, 2.2), in the form and with the names of MiMo-7B's
checkpoints (arXiv 2505.07608), whose config says `num_nextn_predict_layers`. Drafts behind the first go through the
same layer again, on its own features, as EAGLE's do (arXiv 2401.15077).

Features lie beside the KV cache, a line for each of its positions: whoever has a block has its features, so a prefix
that is found in the cache is found with them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splittime.kernels.api import AttentionBatch, KvPools
from splittime.kernels.layer import PackedNorm, PackedWeight
from splittime.kernels.low_rank import AdapterUse
from splittime.models.decoder import Decoder, stores

PREFIX = "model.mtp_layers.0."
DTYPE = torch.bfloat16
NO_TOKEN = 1  # up to this position a token has no embedding: the layer was trained so


class HiddenFeatures:
    """data: [num_blocks, block_size, hidden]."""

    def __init__(self, num_blocks: int, block_size: int, hidden_size: int) -> None:
        self.data, self._block_size = torch.zeros(num_blocks, block_size, hidden_size, dtype=DTYPE), block_size

    def write(self, blocks: Tensor, offsets: Tensor, states: Tensor) -> None:
        """blocks, offsets: int64 [N], where the tokens' K and V are; states: [N, hidden]."""
        self.data[blocks, offsets] = states.to(DTYPE)

    def before(self, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Returns those of the token before each of a batch's, [T, hidden]; of a request's first, zeros."""
        begins = torch.tensor(batch.query_begins)
        rows = torch.arange(len(begins) - 1).repeat_interleave(begins.diff())
        earlier = (positions - 1).clamp_min(0)
        found = self.data[batch.block_tables[rows, earlier // self._block_size], earlier % self._block_size]
        found[positions == 0] = 0
        return found


@dataclass(frozen=True, kw_only=True)
class HeadDecoder(Decoder):
    """A decoder whose input are features and tokens; embedding and head are those of `model()`, as it is now.

    joined: packed [hidden, 2 * hidden], features first."""

    model: Callable[[], Decoder]
    features: HiddenFeatures
    feature_norm: PackedNorm
    token_norm: PackedNorm
    joined: PackedWeight

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KvPools,
        batch: AttentionBatch,
        adapter_uses: Sequence[AdapterUse] = (),
    ) -> Tensor:
        tokens = self.model().embedded(token_ids)
        tokens[positions <= NO_TOKEN] = 0
        before = self.features.before(positions, batch).to(self.ops.activation_dtype)
        normed = self.ops.rms_norm(before, self.feature_norm), self.ops.rms_norm(tokens, self.token_norm)
        hidden = self.ops.linear(torch.cat(normed, dim=1), self.joined)
        return self.through(hidden, positions, stores(kv), self.planned(kv, batch), adapter_uses)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model().headed(self.normed(hidden))
