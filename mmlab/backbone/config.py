"""What a transformer is: one frozen dataclass, free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BackboneConfig:
    """Shape, parts and initial weights of the transformer that every model of the lab is built from.

    Blocks are pre-norm with a norm after the last one. Whether attention is causal and whether there is
    cross-attention follow from a model's shape and are arguments of `Transformer`. Known architectures, as
    values of these fields and of the call:

    | architecture | fields | elsewhere |
    |---|---|---|
    | GPT-2 | layernorm, gelu_tanh, bias | causal; learned positions and tied head in the model |
    | Llama | rmsnorm, swiglu, no bias, rotary, num_kv_heads | causal |
    | Mistral | Llama's and window | causal |
    | Qwen3 | Llama's and qk_norm, head_size (not width / num_heads) | causal |
    | ViT | layernorm, gelu, bias, norm_eps 1e-6 or 1e-12 | not causal; patches, class token in the stem |
    | CLIP | layernorm, quick_gelu, bias | text causal, image not; the norm before the blocks in the stem |
    | Whisper encoder | layernorm, gelu, bias but the key's: a value of `bias` | sinusoids in the stem |
    | Whisper decoder | as its encoder | causal, cross_attention, `memory_BSD` |
    | mixture of experts | another `mlp` by further fields | router losses in `auxiliary` |
    | adaLN (diffusion) | one further field | a per-sample condition, one more argument of the call |

    Args:
        width: size D of a token's vector.
        depth: number of blocks.
        num_heads: query heads H.
        num_kv_heads: key and value heads G, each shared by H / G query heads; null means H.
        head_size: size K of a head; null means width / num_heads.
        mlp_size: inner size F of the MLP; null means 4 width, for swiglu 8/3 width up to a multiple of 8.
        activation: `gelu` is exact, `gelu_tanh` the tanh formula, `quick_gelu` is x * sigmoid(1.702 x),
            `relu2` the squared ReLU, `swiglu` silu(gate) * up with a third matrix.
        norm: kind of the norms.
        norm_eps: added to the variance (the mean square for rmsnorm).
        bias: whether matrices and LayerNorms have a bias.
        qk_norm: RMSNorm with a weight on each query and key head, before the rotation.
        dropout: probability on what each sub-layer adds to the residual stream.
        position: `rotary` rotates queries and keys by their positions (arXiv:2104.09864, halves paired).
        rope_base: slowest rotary wavelength is about 2 pi rope_base.
        window: a token attends to at most this many tokens, itself included (causal), or to those at a
            distance under `window` on either side; null means all.
        init_std: standard deviation of the matrices' initial weights.
        residual_init: matrices that write to the residual stream start `scaled` by 1 / sqrt(their number), or
            at `zero`.
    """

    width: int
    depth: int
    num_heads: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    mlp_size: int | None = None
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu2", "swiglu"] = "gelu_tanh"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    bias: bool = True
    qk_norm: bool = False
    dropout: float = 0.0
    position: Literal["none", "rotary"] = "none"
    rope_base: float = 10000.0
    window: int | None = None
    init_std: float = 0.02
    residual_init: Literal["scaled", "zero"] = "scaled"
    parametrization: Literal["standard", "mup"] = "standard"
    base_width: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "width",
            "depth",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "mlp_size",
            "window",
            "base_width",
        )
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.head_size is None and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; "
                "change one of them or set head_size"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}")
        if self.position == "rotary" and self.key_size % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.key_size}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.norm_eps <= 0 or self.rope_base <= 0 or self.init_std < 0:
            raise ValueError(
                "norm_eps and rope_base must be positive and init_std not negative, got "
                f"{self.norm_eps}, {self.rope_base} and {self.init_std}"
            )
        if (self.parametrization == "mup") != (self.base_width is not None):
            raise ValueError(
                f"base_width belongs to parametrization 'mup': got parametrization {self.parametrization!r} "
                f"and base_width {self.base_width}"
            )

    @property
    def kv_heads(self) -> int:
        """Number G of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_size(self) -> int:
        """Size K of one head."""
        return self.width // self.num_heads if self.head_size is None else self.head_size

    @property
    def inner_size(self) -> int:
        """Inner size F of the MLP."""
        if self.mlp_size is not None:
            return self.mlp_size
        return -(-8 * self.width // 24) * 8 if self.activation == "swiglu" else 4 * self.width

    @property
    def width_factor(self) -> float:
        """How many times wider this is than the base width of `mup`; 1 in the standard parametrization.

        Matrices inside the blocks (taken to grow with the width on both sides) start smaller by its square
        root, and AdamW's rate for them is smaller by the factor itself. Embeddings, norms and biases keep
        theirs.
        """
        return 1.0 if self.base_width is None else self.width / self.base_width

    @property
    def attention_scale(self) -> float:
        """What products of queries and keys are multiplied by: 1 / sqrt(K), under `mup` sqrt(base K) / K.

        Where `head_size` is given, heads are as large at the base width and their number grows; where it is
        null, they are as many there and their size grows.
        """
        growth = self.width_factor if self.head_size is None else 1.0
        return 1 / math.sqrt(self.key_size) / math.sqrt(growth)

    @property
    def logit_scale(self) -> float:
        """What hidden states are multiplied by on their way into an output layer, tied or not."""
        return 1 / self.width_factor
