"""Times of a token on paper, by hand from bytes, operations and data sheets."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.memory.data_sheets import DataSheet, Link, data_sheet
from engine.speed import ETHERNET_100G, LLAMA_2_70B, Decoder, Machines, divided_token, partitioned_token
from engine.speed.__main__ import table

ROOT = Path(__file__).parents[3]
SHEET = DataSheet(flops=2e12, bandwidth=1e12, link=Link(1e11, 2e-6))
SMALL = Decoder(parameters=1_000_000_000, layers=10, width=1000, kept=500, vocabulary=50_000)
A100 = data_sheet("NVIDIA A100-SXM4-80GB")


def test_a_ring_takes_its_steps_and_its_share_of_the_bytes():
    one, two = Machines(SHEET, gpus=4), Machines(SHEET, gpus=4, nodes=2, network=Link(1e10, 5e-6))
    assert one.all_gather(4e9) == pytest.approx(10e-6 + 3 * 2e-6 + 3e9 / 1e11)
    assert one.all_reduce(4e9) == pytest.approx(10e-6 + 6 * 2e-6 + 6e9 / 1e11)
    # Eight ranks: seven steps, one of them over the network, whose bandwidth counts.
    assert two.all_gather(4e9) == pytest.approx(10e-6 + 6 * 2e-6 + 5e-6 + 3.5e9 / 1e10)
    assert two.all_reduce(4e9, ranks=4) == one.all_reduce(4e9)  # within a node
    assert two.all_reduce(4e9, ranks=1) == 0
    with pytest.raises(AssertionError, match="8 ranks on nodes of 4 GPUs need a network"):
        replace(two, network=None).all_gather(1.0)


def test_a_token_by_hand():
    machines, rows, length = Machines(SHEET, gpus=4), 8, 100
    cached = 10 * 500 * 2 * 100 * 8  # bytes of a rank's rows: layers, numbers, bytes of one, tokens, rows
    flops = 8 * (2 * 1e9 + 4 * 10 * 1000 * 100)
    through = partitioned_token(SMALL, machines, rows, length)
    assert through.memory == pytest.approx((2e9 + cached) / 1e12)
    assert through.arithmetic == pytest.approx(flops / 2e12)  # 8.16 ms
    assert through.exchange == pytest.approx(12 * (10e-6 + 6e-6) + 0.75 * 2e9 / 1e11)  # 15.192 ms
    assert through.seconds == through.exchange
    # Four ranks decode 32 rows, each with a fourth of the weights and of the rows' keys and values.
    together = divided_token(SMALL, machines, rows, length, ranks=4)
    summed = 10e-6 + 6 * 2e-6 + 1.5 * 32 * 1000 * 2 / 1e11
    logits = 10e-6 + 3 * 2e-6 + 0.75 * 32 * 50_000 * 2 / 1e11
    assert together.memory == pytest.approx((2e9 / 4 + cached) / 1e12)
    assert together.arithmetic == pytest.approx(flops / 2e12)
    assert together.exchange == pytest.approx(21 * summed + logits)
    assert together.seconds == pytest.approx(together.arithmetic + together.exchange)  # more is multiplied than read
    alone = divided_token(SMALL, machines, rows, length, ranks=1)
    assert alone.exchange == 0 and alone.memory == pytest.approx((2e9 + cached) / 1e12)


def test_the_shape_of_llama_2_70b_is_its_configurations():
    with torch.device("meta"):
        layers = {
            count: sum(p.numel() for p in LlamaForCausalLM(_llama_2_70b(layers=count)).parameters()) for count in (1, 2)
        }
    assert LLAMA_2_70B.parameters == layers[1] + 79 * (layers[2] - layers[1])
    assert LLAMA_2_70B.cached(1) == 80 * 2 * 8 * 128 * 2  # 327,680 bytes of a token


def test_llama_2_70b_on_a100s_by_hand():
    one, two = Machines(A100), Machines(A100, nodes=2, network=ETHERNET_100G)
    size = 137.953e9
    # 82 calls of 10 us and 7 steps; 7/8 of the bytes at 300 GB/s: 2 ms and 402 ms.
    assert partitioned_token(LLAMA_2_70B, one, 16, 384).seconds == pytest.approx(0.0019 + size * 7 / 8 / 300e9, 1e-3)
    # 15/16 of them at 12.5 GB/s: 10.35 s, and 3 ms.
    assert partitioned_token(LLAMA_2_70B, two, 16, 384).seconds == pytest.approx(0.0033 + size * 15 / 16 / 12.5e9, 1e-3)
    # (138 GB / 8 + 2.01 GB of keys and values) at 2,039 GB/s: 9.44 ms. 161 sums of 2.1 MB, 12.2 us and 36.6 us of
    # latency each: 7.86 ms; and 8.2 MB of logits, 0.05 ms.
    for machines in (one, two):
        assert divided_token(LLAMA_2_70B, machines, 16, 384, 8).seconds == pytest.approx(9.44e-3 + 7.86e-3 + 5e-5, 1e-3)


def test_the_documents_table_is_computed():
    assert table() in (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table().splitlines()[2:]]
    assert [(row[0], row[5], row[6], row[8]) for row in cells] == [
        ("8 GPUs", "404.3 ms", "317", "103 s"),  # 128 rows; 256 x 0.4043 s
        ("8 GPUs", "17.4 ms", "7,376", "5 s"),  # 0.40 s of weights, 4.44 s of tokens
        ("2 x 8 GPUs", "10,349.8 ms", "25", "2,650 s"),
        ("2 x 8 GPUs", "17.4 ms", "14,752", "15 s"),  # 10.35 s of weights
    ]


def _llama_2_70b(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
