"""Texts for training on a GPU, and the loss there."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo_pair import gpu_rows
from demo_pair.static_generation import StaticGenerator
from interpreter import interpreted
from train_drafters import rejection_loss


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 90}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_rows_of_different_lengths_get_the_tokens_of_transformers() -> None:
    model = _model()
    prompts = [torch.randint(90, (length,)).tolist() for length in (1, 7, 40)]
    generator = StaticGenerator(model)
    generated = generator.generate(prompts, [0.0] * 3, 40, None)
    for prompt, said in zip(prompts, generated, strict=True):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        wanted = model.generate(ids, max_new_tokens=40, do_sample=False, **options)
        assert said == wanted[0, len(prompt) :].tolist()
    stop = generated[2][5]
    assert generator.generate(prompts, [0.0] * 3, 40, stop)[2] == generated[2][: generated[2].index(stop) + 1]


@interpreted
def test_attention_of_one_token_a_row_writes_the_same_texts() -> None:
    model = _model()
    prompts = [torch.randint(90, (length,)).tolist() for length in (1, 7, 40)]
    plain, fast = StaticGenerator(model), StaticGenerator(model)
    assert plain.attend_one is None
    fast.attend_one = gpu_rows.attend_one
    assert fast.generate(prompts, [0.0] * 3, 40, None) == plain.generate(prompts, [0.0] * 3, 40, None)


@interpreted
def test_loss_and_gradient_on_a_device_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    probs = (torch.randn(3, 5000) * 4).softmax(-1)
    outputs, weights = torch.tensor([0, 1, 2, 0, 1, 2, 2]), torch.rand(7)
    logits = torch.randn(7, 5000, requires_grad=True)
    wanted, wanted_overlaps = rejection_loss(logits, probs, outputs, weights)
    (3 * wanted).backward()
    again = logits.detach().clone().requires_grad_()
    loss, overlaps = gpu_rows.rejection_loss_on_gpu(again.mul(1.0), probs, outputs, weights)
    (3 * loss).backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(overlaps, wanted_overlaps)
    torch.testing.assert_close(again.grad, logits.grad)
