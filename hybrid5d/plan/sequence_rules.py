"""Rules of context parallelism: which heads a method can cut, which Ulysses degree, which groups."""

from __future__ import annotations

from hybrid5d.errors import ConfigError

CP_KEY = "actor.model.context_parallel_size"
SIZES_KEY = "actor.model.hierarchical_context_parallel_sizes"


def hybrid_groups(cp_groups: list[list[int]], ulysses: int) -> tuple[list[list[int]], list[list[int]]]:
    """(Ulysses groups, ring groups) inside the cp groups: neighbours in cp order share a Ulysses group.

    hybrid_groups([[0, 1, 2, 3]], 2) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    inner = [g[i : i + ulysses] for g in cp_groups for i in range(0, len(g), ulysses)]
    outer = [g[i::ulysses] for g in cp_groups for i in range(ulysses)]
    return inner, outer


def default_ulysses(num_kv_heads: int, tp: int, cp: int, ranks_per_node: int | None = None) -> int:
    """Default Ulysses degree of `a2a+p2p`: the largest divisor of cp that divides the local kv heads, inside a node.

    tp is the fastest axis, so a Ulysses group of u spans u*tp neighbouring ranks.
    """
    local = max(1, num_kv_heads // tp)
    node = ranks_per_node or cp * tp
    return max(u for u in range(1, cp + 1) if cp % u == 0 and local % u == 0 and (u == 1 or node % (u * tp) == 0))


def ulysses_degree(
    method: str, sizes: tuple[int, ...] | None, num_kv_heads: int, tp: int, cp: int, ranks_per_node: int | None = None
) -> int:
    """Ulysses degree of `a2a+p2p`: as given in [ulysses, ring], else the default; 1 for the other methods."""
    if method != "a2a+p2p" or cp == 1:
        return 1
    return sizes[0] if sizes else default_ulysses(num_kv_heads, tp, cp, ranks_per_node)


def check_heads(
    num_q_heads: int, num_kv_heads: int, tp: int, cp: int, method: str, ulysses: int | None = None
) -> list[ConfigError]:
    """Can the heads be cut by the method's Ulysses exchange? `ulysses` is needed for `a2a+p2p` only."""
    degree = {"a2a": cp, "a2a+p2p": ulysses or 1}.get(method, 1)
    if degree == 1 or num_q_heads % tp:
        return []  # heads that tp cannot cut are the tp rules' business
    q, kv = num_q_heads // tp, max(1, num_kv_heads // tp)
    key, value = (CP_KEY, cp) if method == "a2a" else (SIZES_KEY, [degree, cp // degree])
    shown = (
        f"cp_comm_type {method} with num_attention_heads {num_q_heads}, num_key_value_heads {num_kv_heads}, "
        f"tensor_model_parallel_size {tp}, context_parallel_size {cp}"
    )
    legal = [u for u in range(1, cp + 1) if cp % u == 0 and q % u == 0 and (kv % u == 0 or u % kv == 0)]
    fix = f"use a Ulysses degree in {{{', '.join(map(str, legal))}}} or cp_comm_type p2p"
    if q % degree:
        return [ConfigError(key, value, f"{shown}: {q} query heads a tp rank do not divide by Ulysses {degree}", fix)]
    if kv % degree and degree % kv:
        rule = f"{shown}: {kv} kv heads a tp rank and Ulysses {degree}: one must divide the other"
        return [ConfigError(key, value, rule, fix)]
    return []


def check_hierarchical(sizes: list[int] | tuple[int, ...] | None, cp: int, method: str) -> list[ConfigError]:
    """Is `hierarchical_context_parallel_sizes` = [ulysses, ring] fit for cp and method?"""
    if sizes is None:
        return []
    if method != "a2a+p2p":
        return [ConfigError(SIZES_KEY, list(sizes), f"only cp_comm_type a2a+p2p reads it, not {method}", "remove it")]
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != cp:
        rule = f"must be [ulysses, ring] with ulysses * ring = context_parallel_size {cp}"
        return [ConfigError(SIZES_KEY, list(sizes), rule, f"for example [{cp}, 1] or [1, {cp}]")]
    return []
