"""Torch's attention alone: which kernel it takes, what a shape costs that it meets for the first time, whether numbers
are right, and whether its kernel for rows of various lengths is worth taking. Needs torch and no other package.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.gpu_checks.check import Trial

WAYS = {"without cuDNN": False, "with cuDNN": True}  # the first is how this project computes
ISSUE = "pytorch issue 196678"  # cuDNN: NaN in the query's gradient with a mask, S % 128 == 64 and logits under -88.7
CASES = [(length, shift, padding) for length in (320, 384) for shift in (0, -120) for padding in (True, False)]
TENSORS = ("output", "output at padding", "gradient of the query", "gradient of the key", "gradient of the value")
APART = 0.03  # of their length: by rounding, tensors in 16 bits from those in float32; of a wrong kernel it is about 1
DEAR, SEVERAL = 5.0, 5  # milliseconds more, and times as many, that a new shape has to cost to be worth a word


@dataclass(frozen=True)
class Sizes:
    """Of the tensors: rows and their lengths; rows and slots of decoding; lengths of rows without padding."""

    device: str = "cuda"
    heads: int = 32
    width: int = 64  # of a head
    rows: int = 8
    lengths: Sequence[int] = (301, 317, 333, 349, 365, 397, 429, 463)
    decoded: int = 64
    slots: Sequence[int] = range(270, 290)
    packed: Sequence[int] = range(128, 512, 6)


TINY = Sizes("cpu", heads=2, width=8, rows=2, lengths=(17, 20), decoded=4, slots=range(8, 12), packed=(4, 12, 7))


def alone(trial: Trial) -> None:
    """Torch's own choice of kernel, without cuDNN's and with it; then rows without padding."""
    sizes = Sizes() if trial.needs_gpu("kernels of GPUs, in whose place those of CPUs ran") else TINY
    F.scaled_dot_product_attention(*tensors(sizes, 1, 8, 8))  # torch settles its order in the first call
    order = [SDPBackend(number).name.lower() for number in torch._C._get_sdp_priority_order()]
    trial.tell({"torch": f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}", "order": ", ".join(order)})
    for way, cudnn in WAYS.items():
        with trial.part(way), allowed(cudnn):
            with trial.first_time(f"{way}, outputs and gradients"):
                for length, shift, padding in CASES:
                    right(trial, way, sizes, length, shift, padding)
            costs(trial, way, sizes)
    with trial.part("rows without padding"):
        packed(trial, sizes)


@contextlib.contextmanager
def allowed(cudnn: bool) -> Iterator[None]:
    """Whether torch may choose cuDNN's kernel."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def tensors(sizes: Sizes, rows: int, queries: int, keys: int, shift: int = 0) -> list[Tensor]:
    """Query, key and value, (rows, heads, queries or keys, width) in 16 bits. shift: what all logits are near."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    sixteen = torch.float16
    if sizes.device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        sixteen = torch.bfloat16
    made = [
        0.3 * torch.randn(rows, sizes.heads, length, sizes.width, generator=generator, device=sizes.device)
        for length in (queries, keys, keys)
    ]
    if shift:
        made[0][..., 0], made[1][..., 0] = 1.0, shift * sizes.width**0.5
    return [tensor.to(sixteen).requires_grad_() for tensor in made]


def left_padding(sizes: Sizes, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """(rows, length) bool, false at the first tokens of each row, in each at another number of them; and (rows, 1,
    length, length) bool, what each token sees: a token of the padding sees nothing."""
    starts = 3 * torch.arange(rows, device=sizes.device) % max(2, length // 3)
    real = torch.arange(length, device=sizes.device) >= starts[:, None]
    return real, real[:, None, None] & torch.ones(length, length, dtype=torch.bool, device=sizes.device).tril()


def right(trial: Trial, way: str, sizes: Sizes, length: int, shift: int, padding: bool) -> None:
    """Outputs and gradients are numbers; without a shift, those of the written-out products in float32."""
    name = f"S = {length}, logits near {shift}, {'left padding' if padding else 'no mask'}"
    given = tensors(sizes, sizes.rows, length, length, shift)
    real, mask = left_padding(sizes, sizes.rows, length)
    real, how = (real, {"attn_mask": mask}) if padding else (torch.ones_like(real), {"is_causal": True})
    upstream = torch.randn(given[0].shape, device=sizes.device) * real[:, None, :, None]  # padding learns nothing
    found = computed(given, upstream, how)
    kernel = SDPBackend(torch._fused_sdp_choice(*given, **how)).name.lower()
    output, *gradients = found
    by_token = output.transpose(1, 2)
    parts = zip(TENSORS, (by_token[real], by_token[~real], *gradients))
    odd = [f"{part} ({count} numbers)" for part, each in parts if (count := int((~each.isfinite()).sum()))]
    trial.tell({f"{way}: {name}": f"{kernel}, " + (f"NOT FINITE: {', '.join(odd)}" if odd else "all finite")})
    told = f"{way}, {name}: not finite with {kernel}: {', '.join(odd)}"
    if way == "with cuDNN":
        trial.find(
            bool(odd),
            told,
            f"Training with it ends in NaN ({ISSUE}). This project leaves cuDNN's attention off (docs/gpus.md): do not "
            "give --attn_implementation cudnn with these versions.",
        )
    else:
        trial.expect(
            not odd,
            told,
            "This is what this project computes with: training ends in NaN. Give --attn_implementation eager, and let "
            "engine/models/attention.py switch this kernel off as it does cuDNN's.",
        )
    if not shift and not odd:
        with sdpa_kernel(SDPBackend.MATH):
            expected = computed([each.detach().float().requires_grad_() for each in given], upstream, how)
        expected[0] = torch.where(real[:, None, :, None], expected[0], output)
        off = distance(found, expected)
        trial.expect(
            off < APART,
            f"{way}, {name}: {kernel} is {off:.2g} off the written-out products",
            "Its numbers are wrong. Give --attn_implementation eager until torch is another version.",
        )


def computed(given: Sequence[Tensor], upstream: Tensor, how: dict) -> list[Tensor]:
    """Output, and the gradients of query, key and value."""
    output = F.scaled_dot_product_attention(*given, **how)
    return [output.detach(), *torch.autograd.grad(output, given, upstream.to(output.dtype))]


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance of two tensors as a share of their length."""
    pairs = zip(found, expected, strict=True)
    return max(((one.float() - other.float()).norm() / other.float().norm()).item() for one, other in pairs)


def costs(trial: Trial, way: str, sizes: Sizes) -> None:
    """Milliseconds that attention takes with a shape that torch has not met, and with the same again."""
    spent: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": [], "one token": []}
    with trial.first_time(f"{way}, new shapes"):
        for length in sizes.lengths:
            given = tensors(sizes, sizes.rows, length, length)
            _, mask = left_padding(sizes, sizes.rows, length)
            times = []
            for _ in range(2):
                output, forward = timed(sizes, lambda: F.scaled_dot_product_attention(*given, attn_mask=mask))
                upstream = torch.ones_like(output)
                _, backward = timed(sizes, lambda: torch.autograd.grad(output, given, upstream))
                times.append((forward, backward))
            for direction, (new, again) in zip(("forward", "backward"), zip(*times)):
                spent[direction].append((new, again))
        query, key, value = (each.detach() for each in tensors(sizes, sizes.decoded, 1, sizes.slots[-1]))
        for slots in sizes.slots:  # decoding by the model's own code: one slot more each time
            token = [query, key[:, :, :slots], value[:, :, :slots]]
            mask = left_padding(sizes, sizes.decoded, slots)[0][:, None, None]
            new, again = (timed(sizes, lambda: F.scaled_dot_product_attention(*token, attn_mask=mask))[1] for _ in "12")
            spent["one token"].append((new, again))
    for what, pairs in spent.items():
        new, again = (median(times) for times in zip(*pairs[1:]))  # the first loads the kernel
        most = max(first for first, _ in pairs)
        trial.tell({f"{way}: {what}, ms of a new shape / again / most": f"{new:.2f} / {again:.2f} / {most:.2f}"})
        trial.find(
            new > max(again + DEAR, again * SEVERAL),
            f"{way}: {what} takes {new:.0f} ms with a new shape, and {again:.2f} with a known one",
            "Each width of a micro-batch is a new shape, and each token of plain decoding. "
            + ("A reason more to leave cuDNN off." if WAYS[way] else "Pad to fewer widths (training/data/tokens.py)."),
        )


def timed(sizes: Sizes, call: Callable) -> tuple[Tensor, float]:
    """What the call returns, and its milliseconds."""
    wait = torch.cuda.synchronize if sizes.device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    result = call()
    wait()
    return result, 1e3 * (time.perf_counter() - started)


def packed(trial: Trial, sizes: Sizes) -> None:
    """Rows without padding: torch's kernel for rows of various lengths against one call for each row."""
    total = sum(sizes.packed)
    given = [each.squeeze(0).detach().transpose(0, 1).requires_grad_() for each in tensors(sizes, 1, total, total)]
    upstream = torch.randn(given[0].shape, device=sizes.device, dtype=given[0].dtype)
    found, milliseconds = {}, {}
    for name, attend in {"by row": by_row, "varlen": varlen}.items():
        if name == "varlen" and not trial.needs_gpu("torch's kernel for rows of various lengths"):
            return

        def both_ways(attend=attend) -> list[Tensor]:
            output = attend(*given, sizes.packed)
            return [output.detach(), *torch.autograd.grad(output, given, upstream)]

        with trial.first_time(f"rows without padding, {name}"):
            found[name], new = timed(sizes, both_ways)
        milliseconds[name] = min(timed(sizes, both_ways)[1] for _ in range(5))
        words = f"{milliseconds[name]:.2f}, at first {new:.2f}"
        trial.tell({f"{len(sizes.packed)} rows without padding, {name}, ms of both ways": words})
    off = distance(found["varlen"], found["by row"])
    trial.tell({"varlen, off by row by": off})
    trial.expect(
        off < APART,
        f"rows without padding: varlen is {off:.2g} off the numbers by row",
        "Its numbers are wrong here: engine/models/attention.py must not take it with these versions; give "
        "--packing padded.",
    )
    trial.find(
        milliseconds["varlen"] > milliseconds["by row"],
        f"rows without padding: varlen takes {milliseconds['varlen']:.2f} ms, by row {milliseconds['by row']:.2f}",
        "It is not worth taking here: let engine/models/attention.py call attention by row on this GPU.",
    )


def by_row(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention within each row, (N, heads, width) of each and of the result, by one call a row."""
    rows = zip(*(tensor.transpose(0, 1).split(list(lengths), 1) for tensor in (query, key, value)))
    outputs = [F.scaled_dot_product_attention(*(part[None] for part in row), is_causal=True)[0] for row in rows]
    return torch.cat(outputs, 1).transpose(0, 1)


def varlen(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """The same by torch's kernel, which torch 2.10 brought; 2.11 replaced `is_causal` by a window."""
    from torch.nn.attention.varlen import varlen_attn

    older = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if older else {"window_size": (-1, 0)}
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(query.device, torch.int32)
    return varlen_attn(query, key, value, starts, starts, max(lengths), max(lengths), **causal)
