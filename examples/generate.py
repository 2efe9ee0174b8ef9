"""Complete a few prompts at once with the embedded pair, and see what speculation did."""

from specinfer import LLM, SamplingParams

PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def push(self, item):\n"]


def main() -> None:
    llm = LLM("demo")
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=48)):
        stats = output.metrics.speculative_decoding
        print(f"{output.prompt}{output.outputs[0].text}")
        print(f"--- {stats['tokens_per_pass']:.2f} tokens per target pass\n")


if __name__ == "__main__":
    main()
