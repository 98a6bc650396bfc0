"""An imported model against transformers: the same greedy answers, token for token?

    python -m experiments.benchmarks.imported FOLDER [PROMPT ...]

FOLDER is a Hugging Face folder with a tokenizer and a chat template that mmlab knows. Ours answers all
prompts in one ragged batch with a cache; transformers answers one by one.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM

from mmlab.inference.generation import encode_prompt, generate
from mmlab.inference.sampling import SamplingConfig
from mmlab.restore import restore

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three prime numbers greater than 10.",
    "Give me a recipe for pancakes.",
)


@torch.no_grad()
def main(words: list[str]) -> None:
    if not words:
        raise SystemExit(__doc__)
    folder, questions = words[0], words[1:] or list(PROMPTS)
    model = restore(folder)
    assert model.chat is not None, f"{folder} has no chat template that is known"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [encode_prompt(model, [{"role": "user", "content": question}]) for question in questions]
    began = time.perf_counter()
    ours = generate(model, prompts, SamplingConfig(temperature=0, max_new_tokens=64))
    middle = time.perf_counter()
    stops = list(model.chat.stops(model.vocabulary))
    equal = 0
    for question, prompt, answer in zip(questions, prompts, ours, strict=True):
        ids = torch.tensor([prompt.tolist()])
        settings = {
            "do_sample": False,
            "max_new_tokens": 64,
            "eos_token_id": stops,
            "pad_token_id": stops[-1],
        }
        theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
        same = theirs.tolist() == answer.ids
        equal += same
        print(f"{question}\n  ours          {answer.text!r}")
        print(f"  transformers  {model.vocabulary.decode(theirs.tolist(), skip_special=True)!r}")
        print(f"  {len(answer.ids)} tokens, {'equal' if same else 'DIFFERENT'}")
    end = time.perf_counter()
    print(
        f"{equal} of {len(questions)} equal; ours {middle - began:.1f} s, transformers {end - middle:.1f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
