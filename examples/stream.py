"""Stream a completion; accepted draft tokens in green, tokens of the target in plain text."""

from specinfer import LLM, SamplingParams

PROMPT = "def main("


def main() -> None:
    llm = LLM("demo")
    print(PROMPT, end="", flush=True)
    for chunk in llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=48)):
        drafted = any(origin is not None for origin in chunk.origins)
        print(f"\033[32m{chunk.text}\033[0m" if drafted else chunk.text, end="", flush=True)
        if chunk.output is not None:
            tokens_per_pass = chunk.output.metrics.speculative_decoding["tokens_per_pass"]
            print(f"\n--- {tokens_per_pass:.2f} tokens per target pass")


if __name__ == "__main__":
    main()
