"""GGUF files, read directly: configuration, tokenizer and weights, which are dequantized as they are loaded."""
