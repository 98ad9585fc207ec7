"""Exported models are scored by lm-evaluation-harness on the local tasks, without a network."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from benchmarks.common.measure import read
from sympow.cli import main
from sympow.data import BPETokenizer


def test_local_tasks_score_an_exported_model(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).save_pretrained(tmp_path / "hf")
    BPETokenizer.train(["The pass key is 01234567890. Remember it."], 280).save(tmp_path / "hf")
    assert main(["convert", f"{tmp_path}/hf", "--out", f"{tmp_path}/run", "--pattern", "power,softmax"]) == 0
    assert main(["export", f"{tmp_path}/run", "--out", f"{tmp_path}/student"]) == 0
    words = ["harness", f"{tmp_path}/student", "--limit", "2", "--max-length", "256", "--csv", f"{tmp_path}/rows.csv"]
    monkeypatch.setattr(sys, "argv", words)
    harness.main()
    rows = {(row["task"], row["metric"]): row for row in read(tmp_path / "rows.csv")}
    assert rows["passkeys", "exact_match"]["samples"] == 2
    assert 4 < rows["pages", "bits_per_byte"]["value"] < 12  # a random model: about 8 bits
    assert {row["run"] for row in rows.values()} == {"student"}
