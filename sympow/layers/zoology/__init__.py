"""Mixers of the recall study (Arora et al., "Zoology", 2023) and of papers that it compares, one file each."""
