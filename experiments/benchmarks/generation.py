"""Generation: what the cache is worth, and our speed against transformers with the same weights.

    python -m experiments.benchmarks.generation [PAIRS]

6 layers of width 384, 256 new tokens, greedy, float32, one thread. The two of a pair run one after the other,
in turn first and second; printed are the median of the pairwise ratios of time with the smallest and largest,
and the same of ours against itself. Rows whose ids differ are void.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mmlab.backbone.config import BackboneConfig
from mmlab.inference.generation import generate
from mmlab.inference.model import LanguageModel
from mmlab.inference.sampling import SamplingConfig
from mmlab.interop.huggingface import export_folder
from mmlab.interop.weights import ImportedDecoder
from mmlab.modalities.text.vocabulary import ByteVocabulary
from mmlab.models.decoder import Decoder, DecoderConfig

NEW = 256
BACKBONE = BackboneConfig(
    width=384,
    depth=6,
    num_heads=6,
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    position="rotary",
    init_std=0.05,
)
Ids = list[list[int]]


def timed(work: Callable[[], Ids]) -> tuple[float, Ids]:
    began = time.perf_counter()
    ids = work()
    return time.perf_counter() - began, ids


def compare(
    name: str, slow: Callable[[], Ids], fast: Callable[[], Ids], pairs: int, work: float = 1.0
) -> None:
    """Prints how many times faster `fast` is; `work` is how many times more it does."""
    ratios, same = [], True
    timed(slow), timed(fast)
    for pair in range(pairs):
        if pair % 2:
            (second, b), (first, a) = timed(fast), timed(slow)
        else:
            (first, a), (second, b) = timed(slow), timed(fast)
        ratios.append(work * first / second)
        same &= a == b or work != 1
    verdict = "ids equal" if same else "ids DIFFER: void"
    if work != 1:
        verdict = "tokens a second"
    print(
        f"{name:<34}{statistics.median(ratios):6.2f}  ({min(ratios):.2f} to {max(ratios):.2f})  {verdict}",
        flush=True,
    )


@torch.no_grad()
def main(words: list[str]) -> None:
    pairs = int(words[0]) if words else 7
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary = ByteVocabulary()
    network = Decoder(BACKBONE, DecoderConfig(tie_embeddings=True), vocabulary.size).eval()
    network.stem.embedding.weight[vocabulary.end] = 0  # its logit is 0: never the largest
    model = LanguageModel(network, vocabulary)
    sampling = SamplingConfig(temperature=0, max_new_tokens=NEW)
    prompt = torch.randint(256, (8, 16)).tolist()

    def ours(rows: int, use_cache: bool = True) -> Ids:
        return [one.ids for one in generate(model, prompt[:rows], sampling, use_cache=use_cache)]

    with tempfile.TemporaryDirectory() as folder:
        export_folder(
            ImportedDecoder(BACKBONE, network.config, vocabulary.size, network.state_dict()),
            Path(folder) / "hf",
        )
        reference = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=torch.float32).eval()

    def theirs() -> Ids:
        ids = torch.tensor(prompt[:1])
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        return reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 16:].tolist()

    print("times faster, median (smallest to largest)")
    compare("ours against itself", lambda: ours(1), lambda: ours(1), pairs)
    compare("against transformers", theirs, lambda: ours(1), pairs)
    compare("batch of 8 against batch of 1", lambda: ours(1), lambda: ours(8), pairs, work=8)
    compare("cache against no cache", lambda: ours(1, use_cache=False), lambda: ours(1), max(pairs // 2, 1))


if __name__ == "__main__":
    main(sys.argv[1:])
