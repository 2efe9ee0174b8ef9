"""The types that GGUF files are written with, by llama.cpp's names. Nothing here needs torch."""

TYPES = ("q8_0", "q6_k", "q5_k", "q4_k_m", "q4_k", "q5_1", "q5_0", "q4_1", "q4_0")
PLAIN_TYPES = ("f32", "f16", "bf16")  # numbers that are not rounded to codes; for other engines
