"""Newton-Schulz iteration: the nearest matrix with orthogonal rows or columns, many matrices at once."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial a x + b x^3 + c x^5 that acts on the singular values (Jordan et al. 2024, "Muon")."""

SMALLEST_NORM = 1e-7


def newton_schulz(x_NAB: Tensor, steps: int) -> Tensor:
    """Singular values of each matrix moved towards 1 (after five steps they lie in about 0.7 to 1.2).

    Args:
        x_NAB: matrices in the type that the products are computed in; they are normalised in place.
        steps: how many times the polynomial is applied.
    """
    a, b, c = COEFFICIENTS
    x_NAB.div_(x_NAB.norm(dim=(1, 2), keepdim=True).clamp_(min=SMALLEST_NORM))
    A, B = x_NAB.shape[1:]
    while steps > 0:
        # On the shorter side: X X^T and a product from the left, or X^T X and one from the right.
        gram = torch.bmm(x_NAB.mT, x_NAB) if A > B else torch.bmm(x_NAB, x_NAB.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if steps == 1 or max(A, B) < 2 * min(A, B):
            x_NAB = torch.baddbmm(x_NAB, *((x_NAB, factor) if A > B else (factor, x_NAB)), beta=a)
            steps -= 1
            continue
        # Two steps for one pass over the long side: all of these are polynomials in `gram` and commute. More
        # than two would lose the small singular values in bfloat16.
        factor.diagonal(dim1=1, dim2=2).add_(a)
        gram = torch.bmm(torch.bmm(factor, gram), factor)
        second = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor = torch.baddbmm(factor, second, factor, beta=a)
        x_NAB = torch.bmm(x_NAB, factor) if A > B else torch.bmm(factor, x_NAB)
        steps -= 2
    return x_NAB


def fast_type(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies matrices of it faster than those of float32, else float32."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        able = torch.cpu.get_capabilities()
        fast = bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32
