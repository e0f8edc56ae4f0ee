"""EleutherAI's evaluation harness (`pip install lm_eval`) on these models: importing this module registers the model name "chunkwise".

    python -m chunkwise.models.harness run --model chunkwise --model_args pretrained=runs/book --tasks lambada_openai

is the harness's own command line with the name known. `--model hf` works too, once `chunkwise.models` is imported, but for
text generated in batches by a tokenizer that has no token to pad with: the harness adds one, of which the model knows nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from chunkwise.extra import extra

from . import ChunkwiseConfig  # noqa: F401  # registers the model with the Auto classes

with extra("eval", "chunkwise.models.harness"):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM


@register_model("chunkwise")
class ChunkwiseLM(HFLM):
    """The harness's Hugging Face model. Where the tokenizer has no token that begins or ends a text, a line feed does."""

    @property
    def eot_token_id(self) -> int:
        known = super().eot_token_id
        return self.tok_encode("\n", add_special_tokens=False)[0] if known is None else known

    @property
    def prefix_token_id(self) -> int:
        known = super().prefix_token_id
        return self.eot_token_id if known is None else known

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """As the harness does, with a token that the model knows where rows are padded (and nothing is read)."""
        return super()._model_generate(context.where(context < self.config.vocab_size, 0), max_length, stop, **options)


if __name__ == "__main__":
    cli_evaluate()
