"""fla's cache, as far as its layers need one: what each layer remembers, by its index."""

from __future__ import annotations

from ..nn import MixerState


class Cache:
    """States of chunkwise's layers. Made empty, handed to every call of every layer as `past_key_values`."""

    def __init__(self) -> None:
        self.states: dict[int, MixerState] = {}
        self.seen: dict[int, int] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the layer has seen, padding counted."""
        return self.seen.get(layer_idx, 0)

    def reset(self) -> None:
        """Forget everything."""
        self.states.clear()
        self.seen.clear()

    def __len__(self) -> int:
        return len(self.states)

    def advance(self, layer_idx: int, state: MixerState | None, tokens: int) -> None:
        """Take the layer's state after `tokens` more tokens."""
        if state is not None:
            self.states[layer_idx] = state
            self.seen[layer_idx] = self.get_seq_length(layer_idx) + tokens
