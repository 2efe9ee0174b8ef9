"""The embedded demo pair: a small Llama target and a drafter distilled from it.

Both were trained on Python's standard library, which is on every machine that runs this.
"""
