"""Builders of corpora: texts, manuals or source code become arrays of tokens in a folder."""
