"""Print the table of docs/rollouts.md: python -m engine.speed"""

import argparse

from engine.memory.data_sheets import data_sheet
from engine.speed import ETHERNET_100G, LLAMA_2_70B, Machines, divided_token, partitioned_token

ROWS, PROMPT, RESPONSE, RANKS = 16, 256, 256, 8


def table() -> str:
    """Llama-2 70B on eight A100s and on two nodes of them, through partitions and by copies that eight ranks hold."""
    sheet = data_sheet("NVIDIA A100-SXM4-80GB")
    assert sheet is not None
    lines = [
        "| | backend | read | multiply | exchange | a token | tokens/s | new weights | 256 tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    one, two = Machines(sheet), Machines(sheet, nodes=2, network=ETHERNET_100G)
    for name, machines in (("8 GPUs", one), ("2 x 8 GPUs", two)):
        length = PROMPT + RESPONSE / 2  # on average
        ways = {
            "`zero3`": (partitioned_token(LLAMA_2_70B, machines, ROWS, length), 0.0),
            f"`--inference_tp_size {RANKS}`": (
                divided_token(LLAMA_2_70B, machines, ROWS, length, RANKS),
                machines.all_gather(LLAMA_2_70B.size),  # every rank gathers each weight, and keeps its part
            ),
        }
        for way, (token, filling) in ways.items():
            parts = (token.memory, token.arithmetic, token.exchange, token.seconds)
            cells = [name, way, *(f"{1e3 * part:,.1f} ms" for part in parts)]
            cells += [f"{ROWS * machines.world / token.seconds:,.0f}", f"{filling:.1f} s" if filling else "-"]
            lines.append(f"| {' | '.join(cells)} | {filling + RESPONSE * token.seconds:,.0f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser("python -m engine.speed", description=table.__doc__).parse_args()  # takes none but --help
    print(table())
