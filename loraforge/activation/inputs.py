"""Second moments of the inputs of a base model's linear maps: collected once, kept as one hashed file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.activation.moments import REMEDY, Moments, packed, read_header, write_moments
from loraforge.activation.whitened import SHRINKAGE, shrunk, whitened_factors
from loraforge.errors import InputError, UsageError
from loraforge.files import read_jsonl
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.offline import offline_imports
from loraforge.fleet.peft_io import Adapter, LoraModule
from loraforge.progress import progress


@dataclass(frozen=True)
class InputMoments(Moments):
    """C = E[x x^T] of every distinct input; the norm is |dW C^1/2|_F.

    Parameters
    ----------
    inputs: the tensor that holds each module's moments; projections that share an input share one.
    """

    inputs: Mapping[str, str]

    schema = "loraforge.moments/1"
    norm = "activations"
    factors_path = "whitened"

    @classmethod
    def of(cls, path: Path, header: Mapping[str, Any]) -> InputMoments:
        return cls(path, header["tensors_sha256"], header["base"], header["tokens"], header["inputs"])

    def require(self, adapter: Adapter) -> None:
        """The moments are the base model's: any adapter over it has them."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"shrinkage": SHRINKAGE}

    def ordered(
        self, adapter: Adapter, module: LoraModule, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return whitened_factors(a, b, module.scale, shrunk(self.second_moment(module.name, module.d_in)))

    def second_moment(self, module: str, d_in: int) -> Tensor:
        """C = E[x x^T] of the inputs of ``module`` at length sqrt(d_in), float64 [d_in, d_in].

        Raises InputError where there is none, or one of another size.
        """
        key = self.inputs.get(module)
        if key is None:
            raise InputError("no moments of this module's inputs", path=self.path, key=module, remedy=REMEDY)
        return self.symmetric(key, d_in, module=module)


def read_texts(paths: Sequence[Path], *, limit: int | None = None) -> list[str]:
    """Calibration texts: ``prompt`` or ``text`` of every JSON line, or every line of any other file; no labels.

    ``limit``: the first so many of each file. Raises InputError where a file has none.
    """
    found: list[str] = []
    for path in paths:
        if path.suffix == ".jsonl":
            texts = [str(record.get("prompt", record.get("text", ""))) for record in read_jsonl(path)]
        else:
            try:
                texts = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"cannot be read ({error})", path=path) from error
        texts = [text for text in texts if text.strip()][:limit]
        if not texts:
            raise InputError("holds no text", path=path, remedy='write lines of text, or of {"prompt": ...}')
        found += texts
    return found


def collect_moments(
    base: Path,
    texts: Sequence[str],
    out: Path,
    *,
    device: str = "cpu",
    batch_size: int = 16,
    max_tokens: int = 512,
) -> InputMoments:
    """Run the base model of folder ``base`` over ``texts`` and write the moments of its linear maps to ``out``.

    Every input counts at length sqrt(d). Sums are taken over real tokens, never over padding, in FP32 within a batch
    and FP64 between. The first ``max_tokens`` of a text count. The output layer is left out.
    """
    if not texts:
        raise UsageError("no calibration texts", remedy="name files of texts")
    with offline_imports():
        from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
    encoded = sorted(
        (tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens] for text in texts), key=len
    )
    encoded = [ids for ids in encoded if ids]
    batches = [encoded[start : start + batch_size] for start in range(0, len(encoded), batch_size)]
    sums = _Sums()
    with torch.inference_mode(), _watched(model, sums), progress("moments", len(batches)) as ticker:
        for rows in batches:
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            mask = torch.zeros(len(rows), width, dtype=torch.long)
            for row, tokens in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens)] = 1
            sums.begin(mask.bool().to(device))
            model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
            ticker.advance(f"{width} tokens")
    return _write(out, sums, tensors_sha256(base / "model.safetensors"))


class _Sums:
    """Sums of x x^T by distinct input, every x taken at length sqrt(d). Projections of the very same tensor share one.

    A few positions of every text (the first above all) have inputs hundreds of times as long as the rest, which no
    answer hangs on; as they are, they would decide what C is.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.inputs: dict[str, str] = {}
        self.sums: dict[str, Tensor] = {}
        self._mask: Tensor | None = None
        self._last: tuple[Tensor | None, str] = (None, "")

    def begin(self, mask: Tensor) -> None:
        """The next forward pass has real tokens where ``mask`` [batch, width] is true."""
        self._mask, self._last = mask, (None, "")
        self.tokens += int(mask.sum())

    def see(self, name: str, x: Tensor) -> None:
        """Module ``name`` is called with ``x`` [batch, width, d_in]."""
        last, key = self._last
        if x is last and self.inputs.get(name, key) == key:
            self.inputs[name] = key
            return
        self._last = (x, name)
        self.inputs[name] = name
        rows = x[self._mask].float()
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows = rows * (rows.shape[1] ** 0.5 / torch.where(length > 0, length, 1.0))
        total = (rows.mT @ rows).double()
        self.sums[name] = total if name not in self.sums else self.sums[name].add_(total)


@contextmanager
def _watched(model: Any, sums: _Sums) -> Iterator[None]:
    """Tell ``sums`` of every call of a linear map but the output layer's."""
    output = model.get_output_embeddings()
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: sums.see(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _write(out: Path, sums: _Sums, base_sha256: str) -> InputMoments:
    tensors = {name: packed(total / sums.tokens) for name, total in sums.sums.items()}
    header = {
        "schema": InputMoments.schema,
        "base": base_sha256,
        "tokens": sums.tokens,
        "inputs": sums.inputs,
    }
    write_moments(out, tensors, header)
    return InputMoments.of(out, read_header(out))
