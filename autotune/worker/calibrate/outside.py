"""Device memory outside PyTorch's allocator: what each part of a training step adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from autotune.errors import first_line


def outside() -> Iterator[dict[str, Any]]:
    """Yield a line for each thing that is done for the first time, as the verb `outside` gives them.

    Nothing else may use the card.
    """
    device, half = torch.device("cuda", 0), torch.bfloat16

    def outside_bytes() -> int:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))

    def random(*sizes: int, dtype: torch.dtype = half) -> Any:
        return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)

    def pass_back(result: Any) -> None:
        result.sum().backward()

    def product() -> None:
        pass_back(random(512, 512) @ random(512, 512))

    def single_product() -> None:
        x, y = (random(512, 512, dtype=torch.float32) for _ in range(2))
        pass_back(x @ y)

    def large_products() -> None:
        for _ in range(2):
            x = random(8192, 4096)
            pass_back(functional.linear(x, random(14336, 4096)))

    def attention() -> None:
        q, k, v = (random(2, 16, 1024, 64) for _ in range(3))
        pass_back(functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def layers() -> None:
        x, weight = random(64, 1024), random(1024)
        hidden = functional.rms_norm(functional.silu(x) * x, (1024,), weight)
        labels = torch.zeros(64, dtype=torch.int64, device=device)
        pass_back(functional.cross_entropy(hidden.float(), labels))
        pass_back(functional.embedding(labels, random(100, 32)))
        pass_back(torch.cat([x, x]).softmax(-1))

    def adamw() -> None:
        weight = torch.nn.Parameter(random(1024, 1024).detach())
        weight.grad = torch.ones_like(weight)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        torch.optim.AdamW([weight], fused=True).step()

    def of_bitsandbytes() -> None:
        import bitsandbytes as module

        bitsandbytes: Any = module
        weight = torch.nn.Parameter(random(1024, 1024).detach())
        weight.grad = torch.ones_like(weight)
        bitsandbytes.optim.AdamW8bit([weight]).step()
        bitsandbytes.functional.quantize_4bit(weight.detach(), quant_type="nf4")

    def context() -> None:
        torch.zeros(1, device=device)

    things: tuple[Callable[[], None], ...] = (
        *(context, product, single_product, large_products, attention, layers, adamw),
        of_bitsandbytes,
    )
    for thing in things:
        problem = None
        try:
            thing()
        except (ImportError, RuntimeError) as error:
            problem = first_line(error, 200)
        yield {"did": thing.__name__, "outside_bytes": outside_bytes(), "problem": problem}
