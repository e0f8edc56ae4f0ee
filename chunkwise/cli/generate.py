"""`chunkwise generate`: text from a saved model, shown as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import option
from .recipe import check_size, choose_device, choose_threads
from .refusal import Refusal, need, refusing

PIECE = 4096  # tokens of a long prompt read at a time, so that reading it takes no more memory than that


def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a saved model.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "\n",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that hold this share of the probability.")] = 0.95,
    seed: option.Seed = 0,
    device: option.Device = "auto",
    threads: option.Threads = 0,
) -> None:
    """Continue a prompt. The model's state has the same size after a million tokens as after one."""
    need("train")
    _check(model, prompt, max_new_tokens, temperature, top_p)
    check_size("seed", seed)
    device = choose_device(device)
    choose_threads(threads)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import chunkwise.models  # noqa: F401  # registers the model type
    from chunkwise.data.tokenizer import encode

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with refusing(ValueError, OSError, SafetensorError):
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        network = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).to(device).eval()
        printer = Printer(tokenizer, prompt)
    ids = torch.tensor([encode(tokenizer, prompt)], device=device)  # [1, T]
    _check_room(network, ids.shape[1] + max_new_tokens, device)
    pieces = {"prefill_chunk_size": PIECE} if ids.shape[1] > PIECE else {}
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=printer, **pieces, **sampling)


class Printer:
    """A streamer of transformers' generate that writes every character to stdout as soon as it is whole."""

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        from chunkwise.data.tokenizer import Stream

        self._stream, self._prompt = Stream(tokenizer), prompt
        self._begun = False

    def put(self, value: Any) -> None:
        if not self._begun:  # the first call brings the prompt
            self._begun = True
            self._write(self._prompt)
            return
        for token in value.flatten().tolist():
            self._write(self._stream.put(token))

    def end(self) -> None:
        self._write(self._stream.end() + "\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _check(model: Path, prompt: str, max_new_tokens: int, temperature: float, top_p: float) -> None:
    if not prompt:
        raise Refusal("--prompt is empty; a model needs at least one token to begin from")
    if max_new_tokens < 1:
        raise Refusal(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    least = sys.float_info.epsilon  # scores are float32 and divided by it: they must not leave its range
    if temperature and not least <= temperature < float("inf"):
        raise Refusal(f"--temperature must be 0 or a positive number, of at least {least:.0e}, got {temperature}")
    if not 0 < top_p <= 1:
        raise Refusal(f"--top-p must be above 0 and at most 1, got {top_p}")
    check_model(model)


def check_model(model: Path) -> None:
    """Refuse a folder that holds no saved model; point to the newest checkpoint of an unfinished run."""
    if not model.is_dir():
        raise Refusal(f"{model}: no such folder")
    if not (model / "config.json").is_file() or not (model / "model.safetensors").is_file():
        checkpoints = sorted(model.glob("checkpoint-*/model.safetensors"), key=lambda p: p.stat().st_mtime)
        hint = f"; its run is not finished, the newest checkpoint is {checkpoints[-1].parent}" if checkpoints else ""
        raise Refusal(f"{model} holds no model (no config.json with model.safetensors){hint}")


def _check_room(network: Any, tokens: int, device: str) -> None:
    """A recurrent state takes any number of tokens; a layer of full attention keeps the key and value of each, and memory ends."""
    import torch

    config = network.config
    layers = sum(t == "full_attention" for t in getattr(config, "layer_types", None) or ())
    heads = getattr(config, "num_kv_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    need = tokens * layers * 2 * heads * size * network.dtype.itemsize
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else free_memory()
    if need > free:
        raise Refusal(f"{tokens} tokens are more than the memory holds: the attention layers want {need:,} bytes, {free:,} are free")


def free_memory() -> int:
    """Bytes of main memory that are free."""
    import psutil

    return psutil.virtual_memory().available
