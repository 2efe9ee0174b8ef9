"""Several drafters, one tree: a small model and a lookup in earlier text, under each verification rule."""

from specinfer import LLM, SamplingParams

PROMPT = "class Stack:\n    def push(self, item):\n"


def main() -> None:
    params = SamplingParams(temperature=0.8, max_tokens=48, seed=3)
    for rule in ("coupled", "multi-step", "traversal", "target-only"):
        llm = LLM("demo", drafters=["demo", "suffix"], tree="best-first:16", verification=rule)
        (output,) = llm.generate(PROMPT, params)
        stats = output.metrics.speculative_decoding
        print(f"{rule:12} {stats['tokens_per_pass']:.2f} tokens per target pass")


if __name__ == "__main__":
    main()
