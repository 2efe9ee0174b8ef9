"""The tables and figures of the SpecInfer paper (arXiv 2305.09781, section 6), at the scale of this machine."""
