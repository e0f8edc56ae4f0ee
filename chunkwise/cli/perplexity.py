"""`chunkwise perplexity`: how much a model gains from a longer context."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from . import option
from .generate import check_model
from .recipe import choose_device, choose_threads
from .refusal import Refusal, make_folder, need, refusing


def perplexity(
    model: Annotated[Path, typer.Argument(help="Folder of a saved model.", show_default=False)],
    texts: Annotated[list[Path], typer.Argument(help="Text files, or folders of them.", show_default=False)],
    context: Annotated[int, typer.Option(help="Tokens a window.")] = 4096,
    windows: Annotated[int, typer.Option(help="At most so many windows, evenly spaced.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Folder for perplexity.json and perplexity.png; default the model's.")] = None,
    device: option.Device = "auto",
    threads: option.Threads = 0,
) -> None:
    """Perplexity of a text by the number of tokens that the model has seen of it, as a table and a plot."""
    need("train")
    if context < 2 or windows < 1:
        raise Refusal(f"--context must be at least 2 and --windows at least 1, got {context} and {windows}")
    check_model(model)
    device = choose_device(device)
    choose_threads(threads)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import chunkwise.models  # noqa: F401  # registers the model type
    from chunkwise.data.text import read_texts
    from chunkwise.data.tokenizer import encode
    from chunkwise.models.perplexity import by_doubling, nats_by_context

    from .curve import draw_perplexity

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with refusing(ValueError, OSError, SafetensorError):
        found = read_texts(texts, but=model)
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        network = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).to(device).eval()
        tokens = torch.tensor([i for t in found for i in encode(tokenizer, t)])
    if len(tokens) < context:
        raise Refusal(f"the text has {len(tokens)} tokens, fewer than --context {context}")
    folder = model if out is None else out
    make_folder(folder, "--out")
    starts = torch.linspace(0, len(tokens) - context, min(windows, len(tokens) // context), dtype=torch.float64).long()
    nats = sum(nats_by_context(network, tokens[s : s + context][None].to(device)) for s in starts.tolist()) / len(starts)
    seen = by_doubling(torch.as_tensor(nats))
    print("tokens seen   perplexity   bits per token")
    for n, value in seen.items():
        print(f"{n:11,}   {math.exp(value):10.3f}   {value / math.log(2):14.4f}")
    perplexities = {n: math.exp(value) for n, value in seen.items()}
    (folder / "perplexity.json").write_text(json.dumps(perplexities) + "\n")
    draw_perplexity({str(model): perplexities}, folder / "perplexity.png")
    print(f"plot        {folder / 'perplexity.png'}")
