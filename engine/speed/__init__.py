"""What takes how long, on paper: from bytes, floating-point operations, and what data sheets promise.

    machines = Machines(data_sheet("A100 80GB"), gpus=8, nodes=2, network=ETHERNET_100G)
    divided_token(LLAMA_2_70B, machines, rows=16, length=384, ranks=8).seconds

All times are bounds from below: nothing is lost to kernels' starts, to Python or to waiting.
"""

from engine.speed.decoding import LLAMA_2_70B, Decoder, TokenTime, divided_token, partitioned_token
from engine.speed.machines import ETHERNET_100G, Machines

__all__ = ["ETHERNET_100G", "LLAMA_2_70B", "Decoder", "Machines", "TokenTime", "divided_token", "partitioned_token"]
