"""Texts for training, written with a cache of fixed size."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo_pair.static_generation import StaticGenerator


def test_rows_of_different_lengths_get_the_tokens_of_transformers() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 90}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    prompts = [torch.randint(90, (length,)).tolist() for length in (1, 7, 40)]
    generator = StaticGenerator(model)
    found = generator.generate(prompts, [0.0] * 3, 40, None)
    for prompt, said in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        wanted = model.generate(ids, max_new_tokens=40, do_sample=False, **options)
        assert said == wanted[0, len(prompt) :].tolist()
    stop = found[2][5]
    assert generator.generate(prompts, [0.0] * 3, 40, stop)[2] == found[2][: found[2].index(stop) + 1]
