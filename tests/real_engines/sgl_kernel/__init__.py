"""Stands in for sgl-kernel's CPU build, which is not published: what SGLang 0.5.23 calls of it for a dense model, and
for EAGLE-3 with one draft a step (``--speculative-eagle-topk 1``), in plain torch.

With one draft a step the tree is a chain: node i + 1 follows node i, and what each may see is what comes before it.
Names and the order of parameters are sgl-kernel's. Whatever else is called says so.
"""

import ctypes

import torch
import torch.nn.functional as nn
from torch import library

__version__ = "0"


def _spans(starts, ends):
    """(request, its columns, its share of a packed tensor)."""
    packed = 0
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        yield index, slice(start, end), slice(packed, packed + end - start)
        packed += end - start


def assign_req_to_token_pool_cpu(rows, table, starts, ends, packed, _width):
    for index, columns, share in _spans(starts, ends):
        table[rows[index], columns] = packed[share].to(table.dtype)


def assign_extend_cache_locs_cpu(rows, table, starts, ends, packed, _width):
    for index, columns, share in _spans(starts, ends):
        packed[share] = table[rows[index], columns].to(packed.dtype)


def assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, packed, _width, topk, steps):
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, packed, _width)


def build_draft_decode_metadata_cpu(table, rows, _lengths, topk, _steps, _width):
    _expect_chain(topk)
    return table[rows.long()].clone()


def copy_all_layer_kv_cache_cpu(pointers, row_bytes, targets, sources):
    for base, size in zip(pointers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * size, row, size)


def fill_bonus_tokens_cpu(tokens, lengths, bonus, stride):
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus.copy_(tokens.flatten()[last].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(accepted, locations, kept):
    chosen = accepted[accepted >= 0].long()
    kept[: len(chosen)] = locations[chosen].to(kept.dtype)


def rotate_input_ids_cpu(ids, starts, lengths, following, places=None):
    """Each request's ids one to the left; the token that follows goes to the end, or to the place that is named."""
    for index, span, _ in _spans(starts, starts + lengths):
        if span.stop > span.start:
            ids[span] = torch.roll(ids[span], -1)
            ids[span.stop - 1 if places is None else int(places[index])] = following.flatten()[index]


def build_tree_kernel_efficient_cpu(
    _parents,
    _chosen,
    lengths,
    mask,
    positions,
    index,
    next_token,
    next_sibling,
    topk,
    _depth,
    nodes,
    mask_mode,
):
    _expect_chain(topk)
    batch, chain = len(lengths), torch.arange(nodes)
    positions.view(-1)[:] = (lengths[:, None] + chain).flatten().to(positions.dtype)
    index[:] = (torch.arange(batch)[:, None] * nodes + chain).to(index.dtype)
    next_token[:] = torch.cat([chain[1:], torch.tensor([-1])]).to(next_token.dtype)
    next_sibling[:] = -1
    before = torch.tril(torch.ones(nodes, nodes, dtype=torch.bool))
    at = 0
    for length in lengths.tolist():
        prefix = length if int(mask_mode) == 0 else 0  # 0: what is committed has columns of its own
        whole = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), before], 1).flatten()
        mask.view(-1)[at : at + len(whole)] = whole.to(mask.dtype)
        at += len(whole)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Along the chain for as long as the target wants what was drafted; then the target's own token."""
    wanted = target_predict.flatten()
    for row in range(len(candidates)):
        at = int(retrive_index[row, 0])
        accept_index[row, 0] = at
        count = 0
        while count + 1 < accept_index.shape[1] and int(candidates[row, count + 1]) == int(wanted[at]):
            predicts[at] = wanted[at]
            count += 1
            at = int(retrive_index[row, count])
            accept_index[row, count] = at
        predicts[at] = wanted[at]
        accept_token_num[row] = count


def _expect_chain(topk):
    if int(topk) != 1:
        raise NotImplementedError(f"topk {topk}: the stand-in for tests knows chains only")


def _attend(query, keys, values, scale, cap, window, mask):
    """query [n, heads, d] on keys and values [m, kv heads, d] -> [n, heads, d]"""
    if cap > 0 or window > 0:
        raise NotImplementedError("soft caps and sliding windows: not in the stand-in for tests")
    query, keys, values = (one.transpose(0, 1).float() for one in (query, keys, values))
    seen = nn.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)
    return seen.transpose(0, 1)


def _decode_attention(
    query, key_pool, value_pool, _ks, _vs, out, key, value, places, _logits, table, rows, lengths,
    scale, cap, _cross, window, _encoder, _sinks,
):  # fmt: skip
    if key is not None:
        key_pool[places] = key.view(-1, *key_pool.shape[1:]).to(key_pool.dtype)
        value_pool[places] = value.view(-1, *value_pool.shape[1:]).to(value_pool.dtype)
    for index, length in enumerate(lengths.tolist()):
        seen = table[rows[index], :length].long()
        one = slice(index, index + 1)
        out[one] = _attend(query[one], key_pool[seen], value_pool[seen], scale, cap, window, None).to(
            out.dtype
        )


def _extend_attention(
    query, _key, _value, out, key_pool, value_pool, _ks, _vs, table, rows, lengths, new_lengths, starts,
    _longest, scale, cap, _cross, window, _encoder, _sinks, _tree, causal,
):  # fmt: skip
    # The tree is a chain, so its mask says no more than the order does.
    for index, (length, new, start) in enumerate(
        zip(lengths.tolist(), new_lengths.tolist(), starts.tolist(), strict=True)
    ):
        seen = table[rows[index], :length].long()
        mask = torch.ones(new, length, dtype=torch.bool)
        mask = torch.tril(mask, length - new) if causal or _tree is not None else mask
        ours = slice(start, start + new)
        out[ours] = _attend(query[ours], key_pool[seen], value_pool[seen], scale, cap, window, mask).to(
            out.dtype
        )


_operators = library.Library("sgl_kernel", "FRAGMENT")
_operators.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) kb, Tensor(b!) vb, float ks, float vs, Tensor(c!) o, Tensor? k, "
    "Tensor? v, Tensor loc, Tensor logits, Tensor table, Tensor rows, Tensor lengths, float scale, float cap, "
    "bool cross, int window, Tensor? encoder, Tensor? sinks) -> ()"
)
_operators.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor kb, Tensor vb, float ks, float vs, "
    "Tensor table, Tensor rows, Tensor lengths, Tensor new, Tensor starts, int longest, float scale, float cap, "
    "bool cross, int window, Tensor? encoder, Tensor? sinks, Tensor? tree, bool causal) -> ()"
)
_operators.impl("decode_attention_cpu", _decode_attention, "CPU")
_operators.impl("extend_attention_cpu", _extend_attention, "CPU")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not in the stand-in for tests")

    return missing
