"""The constructions of Zoology's appendix H as code: recall by attention, convolutions and states of fixed size.

Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023 (arXiv 2312.04927).
Numbers such as H.27 are those of its first version. docs/theory.md explains every construction in plain words.
"""
