"""The textbook's drafter, a small model of its own, for a target that has no small brother: trained by distillation."""
import torch
import torch.nn.functional as F
from torch import Tensor

from dataclasses import replace

from model import Config, KVCache, Transformer, linear


class Small(Transformer):
    """A Transformer of the target's width, so that it can borrow the target's embedding and output rows: ModelDraft runs it.
    taps: none, it reads tokens only."""
    taps = ()

    def __init__(self, config: Config, vocab: Tensor, layers: int, ffn_dim: int):
        super().__init__(replace(config, layers=layers, ffn_dim=ffn_dim, tie_embeddings=True))
        del self.embed                                                  # the target's comes with draft_trained.borrow
        self.register_buffer("vocab", vocab)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., dim) -> (..., R)"""
        return linear(hidden, self.output)

    def head(self, hidden: Tensor) -> Tensor:
        """(..., dim) -> (..., V): what it cannot guess has the logit -inf."""
        return F.pad(self.logits(hidden), (0, 1), value=-torch.inf)[..., self.index]

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Training: [s][:, t] is what it says about token t + 2 + s.  It reads the text alone, so all are one forward."""
        B, T = tokens.shape
        cache = KVCache(self.config, B, T, tokens.device, self.output.dtype)
        hidden, _ = self(tokens, torch.zeros(B, dtype=torch.int64, device=tokens.device), cache, T)
        return [F.pad(hidden, (0, 0, 0, s + 1))[:, s + 1:] for s in range(depth)]
