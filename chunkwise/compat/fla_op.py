"""The operators of flash-linear-attention: signatures as its callers know them, and the chunkwise operator behind each.

Where fla swallows **kwargs, the names it reads from them are parameters here. cu_seq_lens_q is what transformers calls cu_seqlens: its KDA
layers pass it on under that name, to a function that has a parameter of that name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..spec import public_functions
from .alias import Alias, Call

STATES = "scale=None, initial_state=None, output_final_state=False"
PACKED = "cu_seqlens=None, cu_seqlens_cpu=None"
OLDER = "chunk_size=None, head_first=None, transpose_state_layout=None"
RAW = "use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
GATE = "A_log=None, dt_bias=None"
L2 = "use_qk_l2norm_in_kernel=False"


def slots(call: Call, x: dict[str, Any]) -> Any:
    """fla keeps the slots' keys [N, H, K, M] and values [N, H, M, V] apart; chunkwise has one state [N, H, M, K + V]."""
    if x["g"] is None:
        raise ValueError("gsa: g must be given, [B, T, H, M]; fla's own gate for g=None is not built")
    before = x.pop("initial_state")
    o, S = call(**x, initial_state=None if before is None else torch.cat((before[0].mT, before[1]), -1))
    K = x["k"].shape[-1]
    return o, (None, None) if S is None else (S[..., :K].mT, S[..., K:])


def stateless(call: Call, x: dict[str, Any]) -> Any:
    """fla's states of abc lack the normaliser, so that nothing can continue from them exactly."""
    for n in "initial_state", "output_final_state":
        if x.pop(n):
            raise ValueError(f"chunk_abc: {n}: fla's state lacks the slots' normaliser; chunkwise.abc carries it, [N, H, M, K + V + 1]")
    o, _ = call(**x)
    return o, None


def normalized(call: Call, x: dict[str, Any]) -> Any:
    """Normalised, fla's state is a pair: S [N, H, K, V] and the keys' sum [N, 1, H, K]; chunkwise keeps the sum as S's last column."""
    if not x["normalize"]:
        return call(**x)
    before = x.pop("initial_state")
    if before is not None:
        before = torch.cat((before[0], before[1].squeeze(1)[..., None]), -1) if isinstance(before, tuple | list) else F.pad(before, (0, 1))
    o, S = call(**x, initial_state=before)
    return o, None if S is None else (S[..., :-1], S[..., -1].unsqueeze(1))


def preconditioned(call: Call, x: dict[str, Any]) -> Any:
    """fla keeps A [N, H, K] beside S [N, HV, K, V] and returns it third; chunkwise keeps it as S's last column."""
    S, A = x.pop("initial_state"), x.pop("initial_A_state")
    v_first = x.pop("state_v_first", False)
    x.setdefault("use_qk_l2norm_in_kernel", True)  # the chunk form of the preconditioned KDA always does
    n = x["v"].shape[2] // x["k"].shape[2]
    if S is not None or A is not None:
        given = S if S is not None else A
        N, HV, K, V = given.shape[0], x["v"].shape[2], x["k"].shape[-1], x["v"].shape[-1]
        S = given.new_zeros(N, HV, K, V) if S is None else S.mT if v_first else S
        A = given.new_zeros(N, HV, K) if A is None else A.repeat_interleave(n, 1)
        S = torch.cat((S, A[..., None]), -1)
    o, S = call(**x, initial_state=S)
    if S is None:
        return o, None, None
    return o, S[..., :-1].mT if v_first else S[..., :-1], S[:, ::n, :, -1]


def ungated_preconditioned(call: Call, x: dict[str, Any]) -> Any:
    """The recurrent form also takes a gate per key channel (gk): that is the preconditioned KDA."""
    return preconditioned(summed("fused_recurrent_precond_gated_delta_rule", call, "fused_recurrent_precond_kda", x), x)


def gates(call: Call, x: dict[str, Any]) -> Any:
    """The recurrent form with a gate per key channel is KDA."""
    return summed("fused_recurrent_gated_delta_rule", call, "fused_recurrent_kda", x)(**x)


def summed(name: str, call: Call, keyed: str, x: dict[str, Any]) -> Call:
    """The operator to call: `call`, or `keyed` where there is a gate per key channel (gk), to which fla adds that per head (g)."""
    if x.pop("gv") is not None:
        raise ValueError(f"{name}: gv: chunkwise has no gate per value channel for the delta rule")
    gk = x.pop("gk")
    if gk is None:
        return call
    x["g"] = gk if x["g"] is None else gk + x["g"][..., None]
    return public_functions()[keyed]


def key_gate(call: Call, x: dict[str, Any]) -> Any:
    if x.pop("gv") is not None:
        raise ValueError("fused_recurrent_gla: gv: chunkwise.gla has gates per key channel (gk) alone")
    if x["gk"] is None:
        x["gk"] = x["k"].new_zeros(x["k"].shape)
    return call(**x)


def scalar_gate(call: Call, x: dict[str, Any]) -> Any:
    """fla adds g, per token, and g_gamma [H], constant; either may be missing."""
    constant = x.pop("g_gamma", None)
    if constant is not None:
        constant = constant.expand(*x["v"].shape[:3])
    parts = [t for t in (x["g"], constant) if t is not None]
    x["g"] = sum(parts[1:], parts[0]) if parts else x["v"].new_zeros(x["v"].shape[:3])
    return call(**x)


def erase_key(call: Call, x: dict[str, Any]) -> Any:
    return call(**{**x, "p": x["k"] if x["p"] is None else x["p"]})


def in_context_rate(call: Call, x: dict[str, Any]) -> Any:
    kk, a = x.pop("kk"), x.pop("a")
    return call(**x, a=-kk, b=kk * a)


OPS = (
    Alias("abc", "chunk_abc(q, k, v, s, initial_state=None, output_final_state=False, head_first=None)", convert=stateless,
          note="States are refused: fla's lack the normaliser."),
    Alias("comba", f"chunk_comba(q, k, v, p, g, beta=None, {STATES}, {L2}, {PACKED})", convert=erase_key),
    Alias("comba", f"fused_recurrent_comba(q, k, p, v, g, beta=None, {STATES}, {L2}, cu_seqlens=None)", convert=erase_key),
    Alias("delta_rule", f"chunk_delta_rule(q, k, v, beta, {STATES}, {L2}, {PACKED}, {OLDER})"),
    Alias("delta_rule", f"fused_chunk_delta_rule(q, k, v, beta, {STATES}, {L2}, cu_seqlens=None)", note="fla has the name alone."),
    Alias("delta_rule", f"fused_recurrent_delta_rule(q, k, v, beta=None, {STATES}, {L2}, cu_seqlens=None)"),
    Alias("gated_delta_product",
          f"chunk_gated_delta_product(q, k, v, g, beta, num_householder, {STATES}, {L2}, {PACKED}, cp_context=None)"),
    Alias("gated_delta_rule",
          f"chunk_gated_delta_rule(q, k, v, g, beta, {STATES}, {L2}, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
          f"state_v_first=False, {PACKED}, chunk_indices=None, cp_context=None, use_gate_in_kernel=False, {GATE}, {OLDER})"),
    Alias("gated_delta_rule",
          f"fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, {STATES}, {L2}, "
          f"use_gate_in_kernel=False, {GATE}, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
          "state_v_first=False, cu_seqlens=None, transpose_state_layout=None)",
          convert=gates, note="gk given: KDA. gv is refused. Has a gradient."),
    Alias("gdn2",
          f"chunk_gdn2(q, k, v, g, b, w, {STATES}, {L2}, use_gate_in_kernel=False, {PACKED}, safe_gate=False, lower_bound=None, "
          f"disable_recompute=False, return_intermediate_states=False, state_v_first=False, cp_context=None, {GATE}, {OLDER})"),
    Alias("gdn2",
          f"fused_recurrent_gdn2(q, k, v, g, b, w, {GATE}, {STATES}, {L2}, use_gate_in_kernel=False, lower_bound=None, "
          f"state_v_first=False, cu_seqlens=None, transpose_state_layout=None)"),
    Alias("generalized_delta_rule.dplr",
          f"chunk_dplr_delta_rule(q, k, v, a, b, gk, {STATES}, {PACKED}, safe_gate=False, chunk_size=None, disable_recompute=False, "
          f"cp_context=None, lower_bound=None, head_first=None)", rename={"gk": "g"}),
    Alias("generalized_delta_rule.dplr",
          f"fused_recurrent_dplr_delta_rule(q, k, v, a, b, gk, {STATES}, reverse=False, cu_seqlens=None)", rename={"gk": "g"}),
    Alias("generalized_delta_rule.iplr", f"chunk_iplr_delta_rule(q, k, v, a, b, {STATES}, {PACKED}, head_first=None)",
          note="Has a gradient."),
    Alias("generalized_delta_rule.iplr", f"fused_recurrent_iplr_delta_rule(q, k, v, a, b, {STATES}, cu_seqlens=None)"),
    Alias("gla", f"chunk_gla(q, k, v, g, {STATES}, state_v_first=False, {PACKED})"),
    Alias("gla", f"fused_chunk_gla(q, k, v, g, {STATES}, state_v_first=False, {PACKED})", note="fla has the name alone."),
    Alias("gla",
          f"fused_recurrent_gla(q, k, v, gk=None, gv=None, {STATES}, reverse=False, state_v_first=False, cu_seqlens=None, "
          f"transpose_state_layout=None)", rename={"gk": "g"}, convert=key_gate, note="gv is refused."),
    Alias("gsa", f"chunk_gsa(q, k, v, s, g=None, {STATES}, checkpoint_level=2, {PACKED}, chunk_size=None, head_first=None)", convert=slots,
          note="g is needed."),
    Alias("gsa", f"fused_recurrent_gsa(q, k, v, s, g=None, {STATES}, reverse=False, cu_seqlens=None)", convert=slots, note="g is needed."),
    Alias("hgrn", "chunk_hgrn(x, g, initial_state=None, output_final_state=False)", to="hgrn"),
    Alias("hgrn", "fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None)", to="hgrn"),
    Alias("kda",
          f"chunk_kda(q, k, v, g, beta, {STATES}, {L2}, {RAW}, safe_gate=False, lower_bound=None, disable_recompute=False, "
          f"return_intermediate_states=False, state_v_first=False, {PACKED}, cp_context=None, use_graph=False, max_num_seqs=None, "
          f"{GATE}, {OLDER}, cu_seq_lens_q=None)"),
    Alias("kda",
          f"fused_recurrent_kda(q, k, v, g, beta, {GATE}, {STATES}, {L2}, {RAW}, lower_bound=None, state_v_first=False, "
          f"cu_seqlens=None, transpose_state_layout=None, cu_seq_lens_q=None)", note="Has a gradient."),
    Alias("lightning_attn",
          f"chunk_lightning_attn(q, k, v, layer_idx, num_layers, {STATES}, cu_seqlens=None, chunk_size=None, head_first=None)"),
    Alias("lightning_attn", f"fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, {STATES}, reverse=False, cu_seqlens=None)"),
    Alias("linear_attn", f"chunk_linear_attn(q, k, v, {STATES}, normalize=True, cu_seqlens=None)", convert=normalized),
    Alias("linear_attn", f"fused_chunk_linear_attn(q, k, v, {STATES}, normalize=True, cu_seqlens=None)", convert=normalized),
    Alias("linear_attn", f"fused_recurrent_linear_attn(q, k, v, {STATES}, reverse=False, normalize=False, cu_seqlens=None)",
          convert=normalized),
    Alias("precond_gated_delta_rule",
          "chunk_precond_gated_delta_rule(q, k, v, g_atk, g, beta_atk, beta, scale=None, initial_state=None, initial_A_state=None, "
          f"output_final_state=False, use_qk_l2norm_in_kernel=True, {PACKED}, cp_context=None, transpose_state_layout=False, x=1.5, "
          "eps=1e-6, log_atk_scale=None)", convert=preconditioned),
    Alias("precond_gated_delta_rule",
          "fused_recurrent_precond_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, g_atk=None, beta_atk=None, scale=None, "
          "initial_state=None, initial_A_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
          "transpose_state_layout=False, x=1.5, eps=1e-6, log_atk_scale=None)", convert=ungated_preconditioned, note="gv is refused."),
    Alias("precond_kda",
          "chunk_precond_kda(q, k, v, g, g_atk, beta_atk, beta, scale=None, initial_state=None, initial_A_state=None, "
          f"output_final_state=False, use_gate_in_kernel=False, safe_gate=False, lower_bound=None, {PACKED}, chunk_indices=None, "
          "cp_context=None, transpose_state_layout=False, x=1.5, eps=1e-6, log_atk_scale=None, solve_tril_precision=None, "
          f"disable_recompute=False, return_intermediate_states=False, {GATE})", convert=preconditioned),
    Alias("precond_kda",
          f"fused_recurrent_precond_kda(q, k, v, g, g_atk, beta_atk, beta, {GATE}, scale=None, initial_state=None, initial_A_state=None, "
          "output_final_state=False, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, "
          "transpose_state_layout=False, x=1.5, eps=1e-6, log_atk_scale=None)", convert=preconditioned),
    Alias("retention", f"chunk_retention(q, k, v, {STATES}, cu_seqlens=None, {OLDER})"),
    Alias("retention", f"fused_chunk_retention(q, k, v, {STATES}, cu_seqlens=None, head_first=None)"),
    Alias("retention",
          f"fused_recurrent_retention(q, k, v, {STATES}, reverse=False, state_v_first=False, cu_seqlens=None, "
          "transpose_state_layout=None)"),
    Alias("retention", "parallel_retention(q, k, v, scale=None, output_attentions=False, cu_seqlens=None, head_first=None)"),
    Alias("rwkv6", f"chunk_rwkv6(r, k, v, w, u, {STATES}, {PACKED}, chunk_size=None, head_first=None)"),
    Alias("rwkv6", f"fused_recurrent_rwkv6(r, k, v, w, u, {STATES}, reverse=False, cu_seqlens=None, head_first=None)"),
    Alias("rwkv7",
          f"chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, {PACKED}, safe_gate=False, "
          "chunk_size=None, disable_recompute=False, cp_context=None, lower_bound=None, head_first=None)"),
    Alias("rwkv7",
          "fused_recurrent_rwkv7(r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None, "
          "head_first=None)"),
    Alias("rwkv7",
          "fused_mul_recurrent_rwkv7(r, w, k, v, kk, a, scale=1.0, initial_state=None, output_final_state=False, reverse=False, "
          "cu_seqlens=None, head_first=None)", to="fused_recurrent_rwkv7", convert=in_context_rate),
    Alias("simple_gla", f"chunk_simple_gla(q, k, v, g=None, g_gamma=None, {STATES}, state_v_first=False, {PACKED}, {OLDER})",
          convert=scalar_gate),
    Alias("simple_gla", f"fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, {STATES}, cu_seqlens=None)", convert=scalar_gate),
    Alias("simple_gla",
          f"fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, {STATES}, reverse=False, state_v_first=False, cu_seqlens=None, "
          f"transpose_state_layout=None)", convert=scalar_gate),
    Alias("simple_gla", f"parallel_simple_gla(q, k, v, g=None, scale=None, output_attentions=False, {PACKED}, head_first=None)",
          convert=scalar_gate),
)  # fmt: skip

SHORT = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule"}  # fla's second names
