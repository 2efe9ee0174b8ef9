"""Throughput of a batch of 8 with four adapters and none, against the same batch without adapters.

    PYTHONPATH=src:tests/support python tests/support/lora_throughput.py MODEL --rank 8

Both take turns on one engine. The adapters are too small to change the text, so that both compute the same.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from adapters import ALL, save_adapter
from specinfer import LLM, LoRARequest, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="*", default=list(ALL))
    parser.add_argument("--drafter", nargs="*", default=[])
    parser.add_argument("--tree", default="off")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantization")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            given.model, device="cpu", drafters=given.drafter, tree=given.tree, quantization=given.quantization,
            enable_lora=True, enable_prefix_caching=False,
        ) as llm,
    ):  # fmt: skip
        base = llm.target.loaded.folder
        named = [
            LoRARequest(f"a{i}", i + 1, str(save_adapter(Path(folder) / f"a{i}", base, i, 1e-7, r=given.rank,
                                                         target_modules=given.targets)))
            for i in range(4)
        ]  # fmt: skip
        prompts = [[(7 * i + k) % 500 + 5 for k in range(32)] for i in range(8)]
        arms = {"none": None, "adapters": ([None, *named] * 2)[:8]}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(given.repeats + 1):
            for name, adapters in arms.items():
                before = time.perf_counter()
                outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                if turn:
                    rates[name].append(tokens / (time.perf_counter() - before))
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    print({name: round(rate, 1) for name, rate in medians.items()}, "tokens/s")
    pairs = zip(rates["adapters"], rates["none"], strict=True)
    print("share", round(statistics.median(one / other for one, other in pairs), 3))


if __name__ == "__main__":
    main()
