"""The embedded demo pair: a small Llama target and a drafter distilled from it.

Both were trained on Python's standard library, which every machine that runs this has.
"""
