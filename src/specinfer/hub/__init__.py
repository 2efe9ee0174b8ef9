"""Models by name: folders, GGUF files, the Hugging Face Hub with its cache, and the drafters known for a target."""
