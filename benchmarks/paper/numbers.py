"""Numbers of the paper (SpecInfer, ASPLOS 2024, arXiv 2305.09781v4, section 6), measured on A10 GPUs.

Its figures show bars without numbers; of them, only what the text states is known.
"""

from collections.abc import Iterable, Mapping

BATCH_SIZES = (1, 2, 4, 8, 16)

# Table 1: percentage of tokens of LLaMA-7B among the 1 to 5 best of LLaMA-68M, by prompt set.
SUCCESS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "greedy": ((68, 77, 81, 84, 85), (69, 79, 83, 86, 87), (62, 72, 77, 80, 82), (70, 81, 85, 88, 89),
               (63, 75, 79, 83, 85)),
    "sampled": ((54, 81, 91, 95, 97), (56, 82, 92, 95, 97), (52, 80, 90, 94, 96), (57, 84, 92, 95, 97),
                (55, 82, 91, 95, 97)),
}  # fmt: skip
# Table 2: tokens per step with the expansion <1,1,k,1,1,1,1,1>, k = 1 to 5, by prompt set.
TOKENS: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "greedy": ((2.95, 3.07, 3.21, 3.33, 3.43), (2.58, 3.24, 3.46, 3.59, 3.69), (2.27, 2.69, 2.86, 2.98, 3.07),
               (2.73, 3.40, 3.62, 3.79, 3.91), (2.18, 2.80, 2.97, 3.10, 3.21)),
    "sampled": ((1.79, 2.11, 2.26, 2.32, 2.38), (1.69, 1.99, 2.15, 2.23, 2.28), (1.64, 1.93, 2.08, 2.15, 2.21),
                (1.72, 2.05, 2.19, 2.28, 2.29), (1.67, 1.93, 2.08, 2.15, 2.21)),
}  # fmt: skip
# Table 3: tokens per step of naive sampling and of multi-step speculative sampling, by prompt set.
NAIVE = (1.87, 1.80, 1.73, 1.79, 1.73)
MULTI_STEP = (2.38, 2.28, 2.21, 2.29, 2.21)
# Figure 7, from the text: latency of plain decoding over that of trees, and of sequences over that of trees.
OVER_PLAIN = {"one machine": "1.5-2.5", "two machines": "2.4-2.8"}
OVER_SEQUENCES = "1.2-1.5"
# Figure 8: latency of FlexGen over that of SpecInfer with offloading, by batch size.
OVER_FLEXGEN = {"OPT-13B": (3.3, 3.3, 3.1, 2.7, 2.6), "OPT-30B": (3.5, 3.3, 3.0, 3.0, 2.7)}
# Figure 9, from the text: steps with trees of width 1 over steps with wider trees.
FEWER_STEPS = {"greedy": "1.2-1.5", "sampled": "1.3-1.4"}
# Figure 10, from the text: the best width.
BEST_WIDTH = {1: "5", 2: "5", 4: "2 or 3", 8: "2 or 3", 16: "2 or 3"}
# Figure 11, from the text: time of sequence-based over that of tree-based verification.
OVER_SEQUENCE_VERIFICATION = {1: "1.0", 16: "up to 1.8"}
# Table 1 of the second version of the paper: tokens per step of LLaMA-7B with 1 and with 5 boost-tuned drafters of
# 160 M parameters, and trees of 16 tokens.
BOOSTED = {1: 2.92, 5: 3.58}


def spread(values: Iterable[float], form: str) -> str:
    """Return the smallest and the largest value, such as those of a column over the prompt sets."""
    values = list(values)
    return f"{min(values):{form}}-{max(values):{form}}"
