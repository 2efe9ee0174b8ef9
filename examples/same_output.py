"""The same seed gives the same tokens with and without speculation, at any temperature."""

from specinfer import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=40)
    texts = {}
    for tree in ("off", "1,1,1,1", "3,2,1,1"):
        output = LLM("demo", tree=tree).generate("import os\n\ndef ", params)[0]
        texts[tree] = output.outputs[0].text
        print(f"{tree:>8}: {output.metrics.speculative_decoding['tokens_per_pass']:.2f} tokens per target pass")
    assert len(set(texts.values())) == 1
    print(texts["off"])


if __name__ == "__main__":
    main()
