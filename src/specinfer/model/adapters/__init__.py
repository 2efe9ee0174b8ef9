"""LoRA adapters: files in PEFT's format, and what they add to the linear layers of a loaded model."""
